"""Mistral: Llama with a sliding window."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, choice
from jax_transformer.porting.families.llama import ACTIVATIONS, FIXED, ORDER, rules
from jax_transformer.porting.families.rotary import Rope

FIELDS = (
    Map("vocab_size", "vocab_size", 32000),
    Map("hidden_size", "layer.d_model", 4096),
    Map("intermediate_size", "layer.d_ff", 14336),
    Map("num_hidden_layers", "num_layers", 32),
    Map("num_attention_heads", "layer.num_heads", 32),
    Map("num_key_value_heads", "layer.num_kv_heads", 8),
    Map("head_dim", "layer.head_dim", None),
    Map("max_position_embeddings", "max_len", 131072),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("sliding_window", "layer.window", 4096),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "silu"),
    Rope(),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED | {"layer.qkv_bias": False, "layer.out_bias": False, "layer.ffn_bias": False},
    rules=rules,
    order=ORDER,
)
