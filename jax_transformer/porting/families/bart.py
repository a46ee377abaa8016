"""BART: learned positions, a norm of the embeddings, norms after the sublayers."""

from jax_transformer.config import EncoderDecoderConfig
from jax_transformer.porting.families.base import Family, Map, Require, Skip, choice
from jax_transformer.porting.families.entries import Architectures, Spelled, with_prefix
from jax_transformer.porting.families.halves import OLD, Dropouts, affine, both, norm
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Reshape, Transpose
from jax_transformer.porting.rules import Alias, Rule, Rules

BODY = (
    Spelled(Map("d_model", both("d_model"), 1024), {"hidden_size": "d_model"}),
    Spelled(
        Map("encoder_layers", "num_encoder_layers", 12), {"num_hidden_layers": "encoder_layers"}
    ),
    Map("decoder_layers", "num_decoder_layers", 12),
    Map("encoder_ffn_dim", "encoder.d_ff", 4096),
    Map("decoder_ffn_dim", "decoder.d_ff", 4096),
    Spelled(
        Map("encoder_attention_heads", "encoder.num_heads", 16),
        {"num_attention_heads": "encoder_attention_heads"},
    ),
    Map("decoder_attention_heads", "decoder.num_heads", 16),
    Map("max_position_embeddings", "max_len", 1024),
    choice("activation_function", "encoder.activation", ACTIVATIONS, "gelu"),
    choice("activation_function", "decoder.activation", ACTIVATIONS, "gelu"),
    Map("scale_embedding", "embedding_scale", False),
    Dropouts(("dropout", "attention_dropout", "activation_dropout"), 0.1),
    Skip(("encoder_layerdrop", "decoder_layerdrop"), "about training"),
    Require("normalize_before", False, "norms come after the sublayers"),
    Require("add_final_layer_norm", False, "norms come after the sublayers"),
    Require("add_bias_logits", False, "never read: the bias of the logits is a tensor"),
    *OLD,
)
"""What Marian's config says in the same words."""

FIELDS = (
    *BODY,
    Map("vocab_size", ("src_vocab_size", "tgt_vocab_size"), 50265),
    Require(
        "tie_word_embeddings",
        True,
        "as transformers 5 does not share untied tables, older ones do, and files do not say which",
    ),
    Require("normalize_embedding", True, "the embeddings have a norm"),
    Require("static_position_embeddings", False, "positions are learned"),
    Require("extra_pos_embeddings", 2, "two rows come before that of position 0"),
    Architectures(
        {
            "BartForConditionalGeneration": {"head_bias": True},
            "BartModel": {"head_bias": False},
        },
        "BartForConditionalGeneration",
    ),
)

FIXED = {
    "position": "learned",
    "position_offset": 2,
    "embedding_norm": True,
    "final_norm": False,
    "shared_embedding": True,
    "tied": True,
    "encoder.causal": False,
    "decoder.causal": True,
    "encoder.placement": "post",
    "decoder.placement": "post",
}


def rules(config: EncoderDecoderConfig) -> Rules:
    """Tensor names of `BartForConditionalGeneration`, or of `BartModel`, which lack `model.`."""
    table: Rules = (
        Rule("model.shared.weight", "decoder.embedding.embedding"),
        *half("model.encoder", "encoder"),
        *half("model.decoder", "decoder"),
        *(
            rule
            for name in ("encoder", "decoder")
            for rule in (
                Rule(
                    f"model.{name}.embed_positions.weight",
                    f"{name}.pos_encoding.pos_embedding.embedding",
                ),
                *norm(f"model.{name}.layernorm_embedding", f"{name}.embedding_norm"),
            )
        ),
    )
    prefix = "model." if config.head_bias else ""
    aliases = tuple(
        Alias(f"{prefix}{name}.embed_tokens.weight", f"{prefix}shared.weight")
        for name in ("encoder", "decoder")
    )
    if not config.head_bias:
        return (*aliases, *with_prefix(table, "model."))
    return (*aliases, *table, *head(config.tgt_vocab_size, "model.shared.weight"))


def head(vocab_size: int, table: str | None) -> Rules:
    """The projection by `table`, or by a kernel of its own, with the bias of the logits, which is
    `[1, V]` in files."""
    shape = Reshape((1, vocab_size), (vocab_size,))
    own = Rule("lm_head.weight", "output_proj.kernel", (Transpose(),))
    return (
        own if table is None else Alias("lm_head.weight", table),
        Rule("final_logits_bias", "output_proj.bias", (shape,)),
    )


def half(theirs: str, ours: str) -> Rules:
    """The blocks of one half."""
    source, target = theirs + ".layers.{i}.", ours + ".layers.{i}."
    cross = ours == "decoder"
    names = {
        "self_attn_layer_norm": "norm1",
        "encoder_attn_layer_norm": "norm2",
        "final_layer_norm": "norm3" if cross else "norm2",
    }
    return (
        *attention(source + "self_attn.", target + "self_attn."),
        *(attention(source + "encoder_attn.", target + "cross_attn.") if cross else ()),
        *affine(source + "fc1", target + "ffn.linear1"),
        *affine(source + "fc2", target + "ffn.linear2"),
        *(
            rule
            for there, here in names.items()
            if cross or there != "encoder_attn_layer_norm"
            for rule in norm(source + there, target + here)
        ),
    )


def attention(source: str, target: str) -> Rules:
    """The four projections, which have the same names."""
    return affine(source + "{name}_proj", target + "{name}_proj")


FAMILY = Family(
    name="bart",
    model_types=("bart",),
    architecture="BartForConditionalGeneration",
    config=EncoderDecoderConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
