"""Llama 1 to 3.3 as Meta publishes it: `params.json`, `consolidated.*.pth`, pairs of neighbours.

The rows of queries and keys are put into the order of the other pairing of rotary positions on the
way here, so that the model is that of the family `llama`.
"""

import dataclasses
import math
from typing import Any

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Family, Map, Skip, Values, get
from jax_transformer.porting.families.llama import FIXED
from jax_transformer.porting.operations import RopePairing, Transpose
from jax_transformer.porting.rules import Alias, Ignore, Rule, Rules


@dataclasses.dataclass(frozen=True)
class InnerWidth:
    """F from D: `2/3 * 4 D`, times a multiplier, rounded up to a multiple (`llama/model.py`)."""

    fields: tuple[str, ...] = ("dim", "multiple_of", "ffn_dim_multiplier")

    def read(self, values: Values) -> Values:
        width, multiple = values.get("dim", 4096), values.get("multiple_of", 256)
        if not all(isinstance(n, int) and n > 0 for n in (width, multiple)):
            raise InputError(f"dim={width!r}, multiple_of={multiple!r}: must be whole numbers")
        inner = inner_width(width, multiple, values.get("ffn_dim_multiplier"))
        return {"layer.d_model": width, "layer.d_ff": inner}

    def write(self, config: Config) -> Values:
        width, inner = get(config, "layer.d_model"), get(config, "layer.d_ff")
        if inner_width(width, 256, None) == inner:
            return {"dim": width, "multiple_of": 256}
        multiplier = inner / int(2 * 4 * width / 3)
        while inner_width(width, 1, multiplier) < inner:  # a quotient that was rounded down
            multiplier = math.nextafter(multiplier, math.inf)
        return {"dim": width, "multiple_of": 1, "ffn_dim_multiplier": multiplier}


def inner_width(width: int, multiple: int, multiplier: float | None) -> int:
    """F."""
    inner = int(2 * 4 * width / 3)
    inner = inner if multiplier is None else int(multiplier * inner)
    return -(-inner // multiple) * multiple


# The two small models of Llama 3.2, by D and L: the only ones whose tables are tied, and whose
# rotation is stretched by 32 where the others' is by 8. Their `params.json` says neither.
SMALL = ((2048, 16), (3072, 28))


def is_small(values: Values) -> bool:
    """Whether these are the parameters of such a model."""
    return bool(values.get("use_scaled_rope")) and (
        (values.get("dim"), values.get("n_layers")) in SMALL
    )


@dataclasses.dataclass(frozen=True)
class ScaledRope:
    """The rotation, the length it is for, and whether the tables are tied.

    `use_scaled_rope` is `llama3` of constants in Meta's code: from 8192 tokens, for waves between 1
    and 4 of these, by 8. Files that lack `max_seq_len` are of models of 131072 tokens then.
    """

    fields: tuple[str, ...] = (
        "rope_theta",
        "use_scaled_rope",
        "rope_scaling_factor",
        "max_seq_len",
    )

    def read(self, values: Values) -> Values:
        rotary: Values = {"base": float(values.get("rope_theta") or 10000.0), "scaling": "none"}
        scaled = values.get("use_scaled_rope")
        if scaled:
            factor = values.get("rope_scaling_factor") or (32 if is_small(values) else 8)
            rotary |= {
                "scaling": "llama3",
                "factor": float(factor),
                "original_max_len": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        length = values.get("max_seq_len", 131072 if scaled else 2048)
        settings = {f"layer.rotary.{name}": value for name, value in rotary.items()}
        return settings | {"max_len": length, "tied": is_small(values)}

    def write(self, config: Config) -> Values:
        rotary = get(config, "layer.rotary")
        fields = {"rope_theta": rotary.base, "max_seq_len": get(config, "max_len")}
        if rotary.scaling == "none":
            return fields
        return fields | {"use_scaled_rope": True, "rope_scaling_factor": rotary.factor}


def vocabulary(size: Any) -> Any:
    """Llama 1 and 2 say -1: as many as their tokenizer has."""
    return 32000 if size == -1 else size


FIELDS = (
    Map("vocab_size", "vocab_size", -1, to=vocabulary),
    Map("n_layers", "num_layers", 32),
    Map("n_heads", "layer.num_heads", 32),
    Map("n_kv_heads", "layer.num_kv_heads", None),
    Map("head_dim", "layer.head_dim", None, optional=True),
    Map("norm_eps", "layer.norm_epsilon", 1e-5),
    InnerWidth(),
    ScaledRope(),
    Skip(("max_batch_size", "model_parallel_size"), "about how the model is run"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `llama/model.py`."""
    layer, ours = "layers.{i}.", "layers.{i}."
    attention = layer + "attention."
    queries = RopePairing(config.layer.num_heads, "half")
    keys = RopePairing(config.layer.kv_heads, "half")
    table: Rules = (
        Rule("tok_embeddings.weight", "embedding.embedding"),
        Rule("norm.weight", "norm.scale"),
        Rule(layer + "attention_norm.weight", ours + "norm1.scale"),
        Rule(layer + "ffn_norm.weight", ours + "norm2.scale"),
        Rule(attention + "wq.weight", ours + "self_attn.q_proj.kernel", (queries, Transpose())),
        Rule(attention + "wk.weight", ours + "self_attn.k_proj.kernel", (keys, Transpose())),
        Rule(attention + "wv.weight", ours + "self_attn.v_proj.kernel", (Transpose(),)),
        Rule(attention + "wo.weight", ours + "self_attn.out_proj.kernel", (Transpose(),)),
        Rule(layer + "feed_forward.w1.weight", ours + "ffn.gate_proj.kernel", (Transpose(),)),
        Rule(layer + "feed_forward.w2.weight", ours + "ffn.down_proj.kernel", (Transpose(),)),
        Rule(layer + "feed_forward.w3.weight", ours + "ffn.up_proj.kernel", (Transpose(),)),
        Ignore("{path*}rope.freqs", "the config determines it"),
    )
    if config.tied:
        return (Alias("output.weight", "tok_embeddings.weight"), *table)
    return (*table, Rule("output.weight", "output_proj.kernel", (Transpose(),)))


FAMILY = Family(
    name="llama_meta",
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
