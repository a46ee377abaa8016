"""GPT-2, DistilGPT-2 and what is built like them."""

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.porting.families.base import Family, Map, Require, Skip, choice
from jax_transformer.porting.families.entries import (
    Dropouts,
    Spelled,
    Widths,
    query_key_value,
    with_prefix,
)
from jax_transformer.porting.families.llama import ACTIVATIONS
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

FIELDS = (
    Map("vocab_size", "vocab_size", 50257),
    Spelled(Map("n_positions", "max_len", 1024), {"max_position_embeddings": "n_positions"}),
    Spelled(Widths("n_embd", "n_inner", 768), {"hidden_size": "n_embd"}),
    Spelled(Map("n_layer", "num_layers", 12), {"num_hidden_layers": "n_layer"}),
    Spelled(Map("n_head", "layer.num_heads", 12), {"num_attention_heads": "n_head"}),
    choice("activation_function", "layer.activation", ACTIVATIONS, "gelu_new"),
    Map("layer_norm_epsilon", "layer.norm_epsilon", 1e-5),
    Dropouts(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    choice("scale_attn_weights", "layer.attention_scale", {True: None, False: 1.0}, True),
    Map("tie_word_embeddings", "tied", True),
    Require("scale_attn_by_inverse_layer_idx", False, "scales that differ by layer are not built"),
    Require("add_cross_attention", False, "attention to an encoder is not built into this model"),
    Skip(("reorder_and_upcast_attn",), "scores are in float32 here in any case"),
    Skip(("n_ctx",), "an old second name of n_positions"),
    Skip(
        ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
         "summary_first_dropout"),
        "about heads for choices, which are not built",
    ),
)  # fmt: skip

FIXED = {"position": "learned", "layer.causal": True, "layer.placement": "pre"}

ORDER = (
    "transformer.wte",
    "transformer.wpe",
    *(
        f"transformer.h.{{i}}.{module}"
        for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    ),
    "transformer.ln_f",
    "lm_head",
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `GPT2LMHeadModel`, whose matrices (`Conv1D`) are `[in, out]` as ours are; and
    of `GPT2Model`, as GPT-2 itself was published."""
    layer, ours = "transformer.h.{i}.", "layers.{i}."
    table: Rules = (
        Rule("transformer.wte.weight", "embedding.embedding"),
        Rule("transformer.wpe.weight", "pos_encoding.pos_embedding.embedding"),
        Rule("transformer.ln_f.weight", "norm.scale"),
        Rule("transformer.ln_f.bias", "norm.bias"),
        *query_key_value(
            layer + "attn.c_attn", ours + "self_attn", config.layer.d_model, conv1d=True
        ),
        Rule(layer + "attn.c_proj.weight", ours + "self_attn.out_proj.kernel"),
        Rule(layer + "attn.c_proj.bias", ours + "self_attn.out_proj.bias"),
        Rule(layer + "ln_{n}.weight", ours + "norm{n}.scale"),
        Rule(layer + "ln_{n}.bias", ours + "norm{n}.bias"),
        Rule(layer + "mlp.c_fc.weight", ours + "ffn.linear1.kernel"),
        Rule(layer + "mlp.c_fc.bias", ours + "ffn.linear1.bias"),
        Rule(layer + "mlp.c_proj.weight", ours + "ffn.linear2.kernel"),
        Rule(layer + "mlp.c_proj.bias", ours + "ffn.linear2.bias"),
        Ignore(layer + "attn.bias", "the causal mask, which needs no table here"),
        Ignore(layer + "attn.masked_bias", "what masked scores were set to"),
    )
    return (*head(config), *with_prefix(table, "transformer."))


def head(config: DecoderOnlyConfig) -> Rules:
    """The projection to logits."""
    if config.tied:
        return (Alias("lm_head.weight", "transformer.wte.weight"),)
    return (Rule("lm_head.weight", "output_proj.kernel", (Transpose(),)),)


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
    order=ORDER,
)
