"""OLMo 2: Llama with norms on what each sublayer puts out, and on whole queries and keys."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import Family, Map, Require, choice
from jax_transformer.porting.families.llama import ACTIVATIONS, FIXED, ORDER
from jax_transformer.porting.families.qwen3 import QUERY_KEY_NORM
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.rules import Rule, Rules

FIELDS = (
    Map("vocab_size", "vocab_size", 50304),
    Map("hidden_size", "layer.d_model", 4096),
    Map("intermediate_size", "layer.d_ff", 11008),
    Map("num_hidden_layers", "num_layers", 32),
    Map("num_attention_heads", "layer.num_heads", 32),
    Map("num_key_value_heads", "layer.num_kv_heads", None),
    Map("head_dim", "layer.head_dim", None, optional=True),
    Map("max_position_embeddings", "max_len", 2048),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-5),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "silu"),
    Rope(),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

NORMS: Rules = (
    Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.norm1.scale"),
    Rule("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.norm2.scale"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `Olmo2ForCausalLM`: the first rule about a name counts."""
    return (*NORMS, *QUERY_KEY_NORM, *llama.rules(config))


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED
    | {
        "layer.placement": "output",
        "layer.norm_scale_in_float32": True,
        "layer.query_key_norm": "full",
        "layer.ffn_bias": False,
    },
    rules=rules,
    order=ORDER,
)
