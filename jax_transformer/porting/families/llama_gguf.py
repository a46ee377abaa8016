"""Llama in files of llama.cpp: metadata in place of a config, pairs of neighbours as in Meta's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Family, Map, Require, Skip, Values, get
from jax_transformer.porting.families.llama import FIXED
from jax_transformer.porting.operations import RopePairing, Transpose
from jax_transformer.porting.rules import Alias, Rule, Rules

ABOUT = ("general.", "tokenizer.", "quantize.", "GGUF.", "split.")
"""How names of metadata begin that say nothing of the architecture."""


def values_of(metadata: Mapping[str, Any], names: Mapping[str, Any]) -> Values:
    """The metadata that make the architecture, and what only the tensors and the vocabulary say.

    Args:
        metadata: of the file.
        names: of its tensors.
    """
    values = {name: value for name, value in metadata.items() if not name.startswith(ABOUT)}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens:
        values.setdefault("llama.vocab_size", len(tokens))
    return values | {"tied": "output.weight" not in names}


@dataclasses.dataclass(frozen=True)
class HeadWidth:
    """The width of a head, under each of the names that it has; all of it is rotated."""

    fields: tuple[str, ...] = (
        "llama.rope.dimension_count",
        "llama.attention.key_length",
        "llama.attention.value_length",
    )

    def read(self, values: Values) -> Values:
        found = {values[name] for name in self.fields if values.get(name) is not None}
        if len(found) > 1:
            raise InputError(f"{', '.join(self.fields)} differ: must be one width of a head")
        return {"layer.head_dim": found.pop() if found else None}

    def write(self, config: Config) -> Values:
        width = get(config, "layer.head_dim")
        return {} if width is None else {self.fields[0]: width}


FIELDS = (
    Map("llama.vocab_size", "vocab_size"),
    Map("llama.context_length", "max_len"),
    Map("llama.embedding_length", "layer.d_model"),
    Map("llama.feed_forward_length", "layer.d_ff"),
    Map("llama.block_count", "num_layers"),
    Map("llama.attention.head_count", "layer.num_heads"),
    Map("llama.attention.head_count_kv", "layer.num_kv_heads", None),
    Map("llama.attention.layer_norm_rms_epsilon", "layer.norm_epsilon"),
    Map("llama.rope.freq_base", "layer.rotary.base", 10000.0),
    Map("tied", "tied"),
    HeadWidth(),
    Require("llama.rope.scaling.type", "none", "scaled rotations are not read from these files"),
    Require("llama.expert_count", 0, "layers of several experts are not built"),
    Skip(("llama.tensor_data_layout",), "a name of the order in which rows are here anyway"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of llama.cpp."""
    layer, ours = "blk.{i}.", "layers.{i}."
    queries = RopePairing(config.layer.num_heads, "half")
    keys = RopePairing(config.layer.kv_heads, "half")
    table: Rules = (
        Rule("token_embd.weight", "embedding.embedding"),
        Rule("output_norm.weight", "norm.scale"),
        Rule(layer + "attn_norm.weight", ours + "norm1.scale"),
        Rule(layer + "ffn_norm.weight", ours + "norm2.scale"),
        Rule(layer + "attn_q.weight", ours + "self_attn.q_proj.kernel", (queries, Transpose())),
        Rule(layer + "attn_k.weight", ours + "self_attn.k_proj.kernel", (keys, Transpose())),
        Rule(layer + "attn_v.weight", ours + "self_attn.v_proj.kernel", (Transpose(),)),
        Rule(layer + "attn_output.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(layer + "ffn_{name}.weight", ours + "ffn.{name}_proj.kernel", (Transpose(),)),
    )
    if config.tied:
        return (Alias("output.weight", "token_embd.weight"), *table)
    return (*table, Rule("output.weight", "output_proj.kernel", (Transpose(),)))


FAMILY = Family(
    name="llama_gguf",
    model_types=(),
    architecture="",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED
    | {
        "layer.activation": "silu",
        "layer.qkv_bias": False,
        "layer.out_bias": False,
        "layer.ffn_bias": False,
    },
    rules=rules,
)
