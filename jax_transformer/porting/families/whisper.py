"""Whisper: sound read by two convolutions, norms before the sublayers, no biases of keys."""

from jax_transformer.config import EncoderDecoderConfig
from jax_transformer.porting.families.bart import half
from jax_transformer.porting.families.base import Family, Map, Skip, choice, get
from jax_transformer.porting.families.entries import Architectures, Spelled, with_prefix
from jax_transformer.porting.families.halves import OLD, Dropouts, affine, both, norm
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Reshape, Transpose
from jax_transformer.porting.rules import Alias, Rule, Rules

FIELDS = (
    Map("vocab_size", "tgt_vocab_size", 51865),
    Map("num_mel_bins", "audio.num_mel_bins", 80),
    Map("max_source_positions", "audio.max_len", 1500),
    Map("max_target_positions", "max_len", 448),
    Spelled(Map("d_model", both("d_model"), 384), {"hidden_size": "d_model"}),
    Spelled(
        Map("encoder_layers", "num_encoder_layers", 4), {"num_hidden_layers": "encoder_layers"}
    ),
    Map("decoder_layers", "num_decoder_layers", 4),
    Map("encoder_ffn_dim", "encoder.d_ff", 1536),
    Map("decoder_ffn_dim", "decoder.d_ff", 1536),
    Spelled(
        Map("encoder_attention_heads", "encoder.num_heads", 6),
        {
            "num_attention_heads": "encoder_attention_heads",
            "num_key_value_heads": "encoder_attention_heads",
        },
    ),
    Map("decoder_attention_heads", "decoder.num_heads", 6),
    choice("activation_function", "encoder.activation", ACTIVATIONS, "gelu"),
    choice("activation_function", "decoder.activation", ACTIVATIONS, "gelu"),
    Map("tie_word_embeddings", "tied", True),
    Dropouts(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    Skip(("scale_embedding",), "never read: embeddings are not scaled"),
    Skip(
        ("encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment", "mask_time_prob",
         "mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length",
         "mask_feature_min_masks"),
        "about training",
    ),
    Skip(("use_weighted_layer_sum", "classifier_proj_size"), "about a head for classes"),
    Skip(("forced_decoder_ids", "median_filter_width"), "about generation, not about the model"),
    Architectures(
        {"WhisperForConditionalGeneration": {}, "WhisperModel": {}},
        "WhisperForConditionalGeneration",
    ),
    *OLD,
)  # fmt: skip

FIXED = {
    "src_vocab_size": None,
    "position": "learned",
    "head_bias": False,
    "encoder.causal": False,
    "decoder.causal": True,
    **dict.fromkeys(both("placement"), "pre"),
    **dict.fromkeys(both("key_bias"), False),
}


def rules(config: EncoderDecoderConfig) -> Rules:
    """Tensor names of `WhisperForConditionalGeneration`, or of `WhisperModel`, which lack `model.`.

    The encoder's positions are a table that is fixed, but kept in files in their dtype.
    """
    rows, width = get(config, "audio.max_len"), config.encoder.d_model
    fixed = Reshape((rows, width), (1, rows, width))
    body: Rules = (
        Rule("model.decoder.embed_tokens.weight", "decoder.embedding.embedding"),
        *affine("model.encoder.conv{n}", "encoder.embedding.conv{n}"),
        Rule("model.encoder.embed_positions.weight", "encoder.pos_encoding.pe", (fixed,)),
        Rule(
            "model.decoder.embed_positions.weight", "decoder.pos_encoding.pos_embedding.embedding"
        ),
        *half("model.encoder", "encoder"),
        *half("model.decoder", "decoder"),
        *norm("model.encoder.layer_norm", "encoder.norm"),
        *norm("model.decoder.layer_norm", "decoder.norm"),
    )
    if config.tied:
        head = Alias("proj_out.weight", "model.decoder.embed_tokens.weight")
    else:
        head = Rule("proj_out.weight", "output_proj.kernel", (Transpose(),))
    return (head, *with_prefix(body, "model."))


FAMILY = Family(
    name="whisper",
    model_types=("whisper",),
    architecture="WhisperForConditionalGeneration",
    config=EncoderDecoderConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
