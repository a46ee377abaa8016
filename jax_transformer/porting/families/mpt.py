"""MPT."""

import dataclasses
from collections.abc import Sequence

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import (
    COMMON,
    Config,
    Entry,
    Family,
    Map,
    Require,
    Skip,
    Values,
    choice,
    unknown_field,
)
from jax_transformer.porting.families.entries import (
    Dropouts,
    Spelled,
    Widths,
    query_key_value,
    with_prefix,
)
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.rules import Alias, Rule, Rules


@dataclasses.dataclass(frozen=True)
class Nested:
    """A field that holds a config of its own, with a table of its own."""

    source: str
    entries: Sequence[Entry]

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, values: Values) -> Values:
        inner = values.get(self.source) or {}
        entries = (*self.entries, *COMMON)
        known = [name for entry in entries for name in entry.fields]
        for name in inner:
            if name not in known:
                raise InputError(f"{self.source}: {unknown_field(name, known)}")
        settings: Values = {}
        for entry in entries:
            settings |= entry.read(inner)
        return settings

    def write(self, config: Config) -> Values:
        inner: Values = {}
        for entry in self.entries:
            inner |= entry.write(config)
        return {self.source: inner}


ATTENTION = (
    Require("attn_type", "multihead_attention", "attention with one key head is another layout"),
    Require("clip_qkv", None, "clipped queries, keys and values are not built"),
    Require("prefix_lm", False, "a prefix that sees itself whole is not built"),
    Require("qk_ln", False, "LayerNorm on queries and keys is not built"),
    Require("attn_uses_sequence_id", False, "say `segments` of packed documents instead"),
    Require("alibi", True, "positions other than ALiBi are not built into this model"),
    Require("alibi_bias_max", 8, "the slopes of ALiBi end at 2^-8"),
    Map("softmax_scale", "layer.attention_scale", None),
    Dropouts(("attn_pdrop",), 0.0),
    Skip(("attn_impl",), "about how the model is run"),
)

FIELDS = (
    Map("vocab_size", "vocab_size", 50368),
    Spelled(Widths("d_model", None, 2048), {"hidden_size": "d_model"}),
    Spelled(Map("n_layers", "num_layers", 24), {"num_hidden_layers": "n_layers"}),
    Spelled(Map("n_heads", "layer.num_heads", 16), {"num_attention_heads": "n_heads"}),
    Map("max_seq_len", "max_len", 2048),
    Map("layer_norm_epsilon", "layer.norm_epsilon", 1e-5),
    Map("tie_word_embeddings", "tied", True),
    Nested("attn_config", ATTENTION),
    choice(
        "norm_type",
        "layer.norm",
        {"low_precision_layernorm": "layer", "layernorm": "layer"},
        "low_precision_layernorm",
    ),
    Require("expansion_ratio", 4, "as `transformers` builds it whatever the file says"),
    Require("no_bias", True, "`transformers` has no biases there"),
    Require("logit_scale", None, "scaled logits are not built"),
    Skip(("learned_pos_emb",), "ALiBi has no table"),
    Skip(("resid_pdrop", "emb_pdrop", "embedding_fraction"), "about training"),
    Skip(("init_device", "init_config", "verbose"), "about new weights"),
    Skip(("tokenizer_name", "auto_map"), "names"),
)

FIXED = {
    "position": "alibi",
    "layer.causal": True,
    "layer.placement": "pre",
    "layer.activation": "gelu",
    "layer.norm_bias": False,
    "layer.qkv_bias": False,
    "layer.out_bias": False,
    "layer.ffn_bias": False,
}


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `MptForCausalLM`."""
    layer, ours = "transformer.blocks.{i}.", "layers.{i}."
    table: Rules = (
        Rule("transformer.wte.weight", "embedding.embedding"),
        Rule("transformer.norm_f.weight", "norm.scale"),
        Rule(layer + "norm_{n}.weight", ours + "norm{n}.scale"),
        *query_key_value(layer + "attn.Wqkv", ours + "self_attn", config.layer.d_model),
        Rule(layer + "attn.out_proj.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(layer + "ffn.up_proj.weight", ours + "ffn.linear1.kernel", (Transpose(),)),
        Rule(layer + "ffn.down_proj.weight", ours + "ffn.linear2.kernel", (Transpose(),)),
    )
    if config.tied:
        head = Alias("lm_head.weight", "transformer.wte.weight")
    else:
        head = Rule("lm_head.weight", "output_proj.kernel", (Transpose(),))
    return (head, *with_prefix(table, "transformer."))


FAMILY = Family(
    name="mpt",
    model_types=("mpt",),
    architecture="MptForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED,
    rules=rules,
)
