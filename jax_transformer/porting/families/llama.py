"""Llama 1 to 3.2, and what is built like them: SmolLM2, TinyLlama."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, choice
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}

FIELDS = (
    Map("vocab_size", "vocab_size", 32000),
    Map("hidden_size", "layer.d_model", 4096),
    Map("intermediate_size", "layer.d_ff", 11008),
    Map("num_hidden_layers", "num_layers", 32),
    Map("num_attention_heads", "layer.num_heads", 32),
    Map("num_key_value_heads", "layer.num_kv_heads", None),
    Map("head_dim", "layer.head_dim", None),
    Map("max_position_embeddings", "max_len", 2048),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("mlp_bias", "layer.ffn_bias", False),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "silu"),
    Rope(),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)

FIXED = {
    "position": "rotary",
    "layer.causal": True,
    "layer.norm": "rms",
    "layer.placement": "pre",
    "layer.gated": True,
    "layer.rotary.pairing": "half",
}

ORDER = (
    "model.embed_tokens",
    *(
        f"model.layers.{{i}}.{module}"
        for module in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    ),
    "model.norm",
    "lm_head",
)
"""Also of the families that have more norms."""


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `LlamaForCausalLM`."""
    layer, ours = "model.layers.{i}.", "layers.{i}."
    table: Rules = (
        Rule("model.embed_tokens.weight", "embedding.embedding"),
        Rule("model.norm.weight", "norm.scale"),
        Rule(layer + "input_layernorm.weight", ours + "norm1.scale"),
        Rule(layer + "post_attention_layernorm.weight", ours + "norm2.scale"),
        Rule(layer + "self_attn.o_proj.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(layer + "self_attn.o_proj.bias", ours + "self_attn.out_proj.bias"),
        Rule(layer + "self_attn.{name}.weight", ours + "self_attn.{name}.kernel", (Transpose(),)),
        Rule(layer + "self_attn.{name}.bias", ours + "self_attn.{name}.bias"),
        Rule(layer + "mlp.{name}.weight", ours + "ffn.{name}.kernel", (Transpose(),)),
        Rule(layer + "mlp.{name}.bias", ours + "ffn.{name}.bias"),
        Ignore("{path*}rotary_emb.inv_freq", "the config determines it"),
    )
    if config.tied:
        return (Alias("lm_head.weight", "model.embed_tokens.weight"), *table)
    return (*table, Rule("lm_head.weight", "output_proj.kernel", (Transpose(),)))


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
    order=ORDER,
)
