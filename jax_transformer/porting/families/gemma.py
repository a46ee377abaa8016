"""Gemma 1: Llama with scaled embeddings and norms that multiply by 1 + weight."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, Skip, choice
from jax_transformer.porting.families.llama import ACTIVATIONS, FIXED, ORDER, rules
from jax_transformer.porting.families.rotary import Rope

SECOND_NAME = "an old second name of the activation, which `transformers` does not read"
CAUSAL = Require(
    "use_bidirectional_attention", None, "only causal attention is built here", (False,)
)

FIELDS = (
    Map("vocab_size", "vocab_size", 256000),
    Map("hidden_size", "layer.d_model", 3072),
    Map("intermediate_size", "layer.d_ff", 24576),
    Map("num_hidden_layers", "num_layers", 28),
    Map("num_attention_heads", "layer.num_heads", 16),
    Map("num_key_value_heads", "layer.num_kv_heads", 16),
    Map("head_dim", "layer.head_dim", 256),
    Map("max_position_embeddings", "max_len", 8192),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("tie_word_embeddings", "tied", True),
    # "gelu" in the files of Gemma 1 has always meant the approximation.
    choice(
        "hidden_act",
        "layer.activation",
        ACTIVATIONS | {"gelu": "gelu_tanh"},
        "gelu_pytorch_tanh",
    ),
    Skip(("hidden_activation",), SECOND_NAME),
    Rope(),
    CAUSAL,
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

SCALED = FIXED | {
    "layer.norm_unit_offset": True,
    "layer.norm_scale_in_float32": True,
    "layer.ffn_bias": False,
    "embedding_scale": True,
}

FAMILY = Family(
    name="gemma",
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=SCALED,
    rules=rules,
    order=ORDER,
)
