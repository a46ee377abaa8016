"""BLOOM and BLOOMZ."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, Skip
from jax_transformer.porting.families.entries import (
    Dropouts,
    Spelled,
    Widths,
    query_key_value,
    with_prefix,
)
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Rule, Rules

FIELDS = (
    Map("vocab_size", "vocab_size", 250880),
    Spelled(
        Widths("hidden_size", None, 64), {"n_embed": "hidden_size", "n_embd": "hidden_size"}
    ),
    Spelled(Map("n_layer", "num_layers", 2), {"num_hidden_layers": "n_layer"}),
    Spelled(Map("n_head", "layer.num_heads", 8), {"num_attention_heads": "n_head"}),
    Map("seq_length", "max_len", 2048),
    Map("layer_norm_epsilon", "layer.norm_epsilon", 1e-5),
    Dropouts(("hidden_dropout", "attention_dropout"), 0.0),
    Map("tie_word_embeddings", "tied", True),
    Require(
        "apply_residual_connection_post_layernorm", False, "a residual after the norm is not built"
    ),
    Require("slow_but_exact", False, "`transformers` leaves out biases with it"),
    Skip(
        ("attention_softmax_in_fp32", "bias_dropout_fusion", "skip_bias_add",
         "masked_softmax_fusion", "skip_bias_add_qkv"),
        "about how sums are split up and rounded",
    ),
    Skip(("n_inner", "offset_alibi", "unk_token_id"), "of the training code, not read since"),
)  # fmt: skip

FIXED = {
    "position": "alibi",
    "embedding_norm": True,
    "layer.causal": True,
    "layer.placement": "pre",
    "layer.activation": "gelu_tanh",
}


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `BloomForCausalLM`, and of `BloomModel`, as BLOOM was published."""
    layer, ours = "transformer.h.{i}.", "layers.{i}."
    attention = layer + "self_attention."
    table: Rules = (
        Rule("transformer.word_embeddings.weight", "embedding.embedding"),
        Rule("transformer.word_embeddings_layernorm.weight", "embedding_norm.scale"),
        Rule("transformer.word_embeddings_layernorm.bias", "embedding_norm.bias"),
        Rule("transformer.ln_f.weight", "norm.scale"),
        Rule("transformer.ln_f.bias", "norm.bias"),
        Rule(layer + "input_layernorm.weight", ours + "norm1.scale"),
        Rule(layer + "input_layernorm.bias", ours + "norm1.bias"),
        Rule(layer + "post_attention_layernorm.weight", ours + "norm2.scale"),
        Rule(layer + "post_attention_layernorm.bias", ours + "norm2.bias"),
        *query_key_value(
            attention + "query_key_value",
            ours + "self_attn",
            config.layer.d_model,
            groups=config.layer.num_heads,
        ),
        Rule(attention + "dense.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(attention + "dense.bias", ours + "self_attn.out_proj.bias"),
        Rule(layer + "mlp.dense_h_to_4h.weight", ours + "ffn.linear1.kernel", (Transpose(),)),
        Rule(layer + "mlp.dense_h_to_4h.bias", ours + "ffn.linear1.bias"),
        Rule(layer + "mlp.dense_4h_to_h.weight", ours + "ffn.linear2.kernel", (Transpose(),)),
        Rule(layer + "mlp.dense_4h_to_h.bias", ours + "ffn.linear2.bias"),
    )
    if config.tied:
        head = Alias("lm_head.weight", "transformer.word_embeddings.weight")
    else:
        head = Rule("lm_head.weight", "output_proj.kernel", (Transpose(),))
    return (head, *with_prefix(table, "transformer."))


FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    architecture="BloomForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
