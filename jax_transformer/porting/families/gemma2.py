"""Gemma 2: Gemma with norms around each sublayer, soft caps, and a window in every other block."""

from typing import Any

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.config.checks import is_number
from jax_transformer.errors import InputError
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import Family, Map, Require, Skip, Values, choice
from jax_transformer.porting.families.gemma import CAUSAL, SCALED, SECOND_NAME
from jax_transformer.porting.families.llama import ACTIVATIONS, ORDER
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.families.windows import FULL, SLIDING, Types, Windows
from jax_transformer.porting.rules import Rule, Rules


def every_other(values: Values) -> Types:
    """The types of the blocks where the file does not list them."""
    return [FULL if index % 2 else SLIDING for index in range(values["num_hidden_layers"])]


def scale_of(scalar: Any) -> float:
    """1 / sqrt(scalar)."""
    if not is_number(scalar) or scalar <= 0:
        raise InputError(f"query_pre_attn_scalar={scalar!r}: must be a number above 0")
    return scalar**-0.5


def scalar_of(scale: float | None) -> int:
    """The inverse of `scale_of` for whole scalars, which these are."""
    if scale is None:
        raise InputError("layer.attention_scale=None: say 1 / sqrt(query_pre_attn_scalar)")
    return round(scale**-2)


SCALE = Map("query_pre_attn_scalar", "layer.attention_scale", 256, to=scale_of, back=scalar_of)

FIELDS = (
    Map("vocab_size", "vocab_size", 256000),
    Map("hidden_size", "layer.d_model", 2304),
    Map("intermediate_size", "layer.d_ff", 9216),
    Map("num_hidden_layers", "num_layers", 26),
    Map("num_attention_heads", "layer.num_heads", 8),
    Map("num_key_value_heads", "layer.num_kv_heads", 4),
    Map("head_dim", "layer.head_dim", 256),
    Map("max_position_embeddings", "max_len", 8192),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("attn_logit_softcapping", "layer.attention_soft_cap", 50.0),
    Map("final_logit_softcapping", "logit_soft_cap", 30.0),
    Map("tie_word_embeddings", "tied", True),
    SCALE,
    choice("hidden_activation", "layer.activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    Skip(("hidden_act",), SECOND_NAME),
    Windows(every_other),
    Rope(),
    CAUSAL,
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

NORMS: Rules = (
    Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_norm1.scale"),
    Rule("model.layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.norm2.scale"),
    Rule("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.post_norm2.scale"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `Gemma2ForCausalLM`: the first rule about a name counts."""
    return (*NORMS, *llama.rules(config))


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=SCALED | {"layer.placement": "sandwich"},
    rules=rules,
    order=ORDER,
)
