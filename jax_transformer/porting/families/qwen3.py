"""Qwen 3 (dense): Llama with a norm on each head of queries and keys."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import Family, Map, Require, choice
from jax_transformer.porting.families.llama import ACTIVATIONS, FIXED, ORDER
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.families.windows import SwitchedWindows
from jax_transformer.porting.rules import Rule, Rules

FIELDS = (
    Map("vocab_size", "vocab_size", 151936),
    Map("hidden_size", "layer.d_model", 4096),
    Map("intermediate_size", "layer.d_ff", 22016),
    Map("num_hidden_layers", "num_layers", 32),
    Map("num_attention_heads", "layer.num_heads", 32),
    Map("num_key_value_heads", "layer.num_kv_heads", 32),
    Map("head_dim", "layer.head_dim", 128),
    Map("max_position_embeddings", "max_len", 32768),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "silu"),
    SwitchedWindows(),
    Rope(),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

QUERY_KEY_NORM: Rules = tuple(
    Rule(
        f"model.layers.{{i}}.self_attn.{name}_norm.weight",
        f"layers.{{i}}.self_attn.{name}_norm.scale",
    )
    for name in "qk"
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `Qwen3ForCausalLM`."""
    return (*QUERY_KEY_NORM, *llama.rules(config))


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED | {"layer.query_key_norm": "head", "layer.ffn_bias": False},
    rules=rules,
    order=ORDER,
)
