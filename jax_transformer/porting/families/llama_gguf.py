"""Llama in files of llama.cpp: metadata in place of a config, pairs of neighbours as in Meta's."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.config import DecoderOnlyConfig, RotaryConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Family, Map, Require, Skip, Values, get
from jax_transformer.porting.families.llama import FIXED
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.operations import RopePairing, Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules

ABOUT = ("general.", "tokenizer.", "quantize.", "GGUF.", "split.")
"""How names of metadata begin that say nothing of the architecture."""


CONTEXT = "llama.context_length"

FACTORS = "rope_freqs.weight"
"""A tensor of what the frequency of each pair is divided by: Llama 3's scaling."""


def values_of(metadata: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Values:
    """The metadata that make the architecture, and what only the tensors and the vocabulary say.

    Args:
        metadata: of the file.
        tensors: of the file, of which one is a part of the config.
    """
    values = {name: value for name, value in metadata.items() if not name.startswith(ABOUT)}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens:
        values.setdefault("llama.vocab_size", len(tokens))
    if FACTORS in tensors:
        values[FACTORS] = np.asarray(tensors[FACTORS].read(), np.float64).tolist()
    return values | {"tied": "output.weight" not in tensors}


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


SCALING = "llama.rope.scaling."


@dataclasses.dataclass(frozen=True)
class ScaledRope:
    """The base of the rotation and its scaling: `linear` and `yarn` by name, and factors of each
    frequency, which are `llama3` where they are those of its published settings."""

    fields: tuple[str, ...] = (
        "llama.rope.freq_base",
        f"{SCALING}type",
        f"{SCALING}factor",
        f"{SCALING}original_context_length",
        f"{SCALING}finetuned",
        f"{SCALING}yarn_beta_fast",
        f"{SCALING}yarn_beta_slow",
        FACTORS,
    )

    def read(self, values: Values) -> Values:
        factor = values.get(f"{SCALING}factor")
        kind = values.get(f"{SCALING}type", "none" if factor is None else "linear")
        if kind not in ("none", "linear", "yarn"):
            raise InputError(f"{SCALING}type={kind!r}: must be none, linear or yarn")
        if (kind == "none") != (factor is None):
            raise InputError(
                f"{SCALING}type={kind!r} with {SCALING}factor={factor!r}: a scaled rotation needs "
                f"both, another neither"
            )
        base = float(values.get("llama.rope.freq_base", 10000.0))
        rotary: Values = {"base": base, "scaling": kind}
        length = values.get(f"{SCALING}original_context_length", values.get(CONTEXT))
        if factor is not None:
            rotary["factor"] = float(factor)
        if kind == "yarn":
            rotary["original_max_len"] = length
            for name in ("beta_fast", "beta_slow"):
                if f"{SCALING}yarn_{name}" in values:
                    rotary[name] = float(values[f"{SCALING}yarn_{name}"])
        if FACTORS in values:
            if kind != "none":
                raise InputError(f"{FACTORS} with {SCALING}type={kind!r}: must be one or the other")
            rotary |= llama3_of(values[FACTORS], base) or {
                "scaling": "longrope",
                "factor": 1.0,
                "original_max_len": length,
                "attention_factor": 1.0,
                "short_factors": tuple(values[FACTORS]),
                "long_factors": tuple(values[FACTORS]),
            }
        return {f"layer.rotary.{name}": value for name, value in rotary.items()}

    def write(self, config: Config) -> Values:
        rotary = get(config, "layer.rotary")
        fields: Values = {"llama.rope.freq_base": rotary.base}
        if rotary.scaling == "llama3":
            width = get(config, "layer").head_width
            return fields | {FACTORS: llama3_factors(rotary, width).tolist()}
        if rotary.scaling == "longrope" and rotary.short_factors == rotary.long_factors:
            return fields | {FACTORS: list(rotary.short_factors)}
        if rotary.scaling == "none":
            return fields
        fields |= {f"{SCALING}type": rotary.scaling, f"{SCALING}factor": rotary.factor}
        if rotary.scaling == "yarn":
            fields |= {
                f"{SCALING}original_context_length": rotary.original_max_len,
                f"{SCALING}yarn_beta_fast": rotary.beta_fast,
                f"{SCALING}yarn_beta_slow": rotary.beta_slow,
            }
        return fields


def llama3_of(factors: Sequence[float], base: float) -> Values | None:
    """The published setting of `llama3` that has these factors, if one has."""
    settings: Values = {
        "factor": float(max(factors)),
        "original_max_len": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rotary = RotaryConfig(base=base, scaling="llama3", **settings)
    expected = llama3_factors(rotary, 2 * len(factors))
    if not np.allclose(factors, expected, rtol=1e-5, atol=0):
        return None
    return {"scaling": "llama3", **settings}


def llama3_factors(rotary: RotaryConfig, width: int) -> np.ndarray:
    """What the frequency of each pair is divided by, `[width / 2]` (`convert_hf_to_gguf.py`)."""
    waves = 2 * np.pi * rotary.base ** (np.arange(0, width, 2) / width)
    turns = (rotary.original_max_len or 1) / waves
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - kept) / rotary.factor + kept)


FIELDS = (
    Map("llama.vocab_size", "vocab_size"),
    Map(CONTEXT, "max_len"),
    Map("llama.embedding_length", "layer.d_model"),
    Map("llama.feed_forward_length", "layer.d_ff"),
    Map("llama.block_count", "num_layers"),
    Map("llama.attention.head_count", "layer.num_heads"),
    Map("llama.attention.head_count_kv", "layer.num_kv_heads", None),
    Map("llama.attention.layer_norm_rms_epsilon", "layer.norm_epsilon"),
    Map("tied", "tied"),
    HeadWidth(),
    ScaledRope(),
    Require("llama.expert_count", 0, "layers of several experts are not built"),
    Skip(("llama.tensor_data_layout",), "a name of the order in which rows are here anyway"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of llama.cpp."""
    layer, ours = "blk.{i}.", "layers.{i}."
    queries = RopePairing(config.layer.num_heads, "half")
    keys = RopePairing(config.layer.kv_heads, "half")
    table: Rules = (
        Ignore(FACTORS, "the scaling of the rotation, which is in the config"),
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
