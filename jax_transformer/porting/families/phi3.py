"""Phi-3, 3.5 and Phi-4 mini: Llama with fused projections and a rotation for long contexts."""

import dataclasses
import math

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import (
    Config,
    Family,
    Map,
    Require,
    Skip,
    Values,
    choice,
    get,
)
from jax_transformer.porting.families.llama import ACTIVATIONS, FIXED
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.operations import Split, Transpose
from jax_transformer.porting.rules import Rule, Rules

LENGTH = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class LongRope:
    """The rotation of the leading `partial_rotary_factor` of each head; `longrope`, which old files
    call `su` or `yarn`, takes the length of its training from a field beside it."""

    rope: Rope = dataclasses.field(default_factory=Rope)
    length: int = 4096
    """Default of that field."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.rope.fields, "partial_rotary_factor", LENGTH)

    def read(self, values: Values) -> Values:
        given = (values.get("rope_scaling") or {}) | (values.get("rope_parameters") or {})
        if (given.get("rope_type") or given.get("type")) in ("longrope", "su", "yarn"):
            given["rope_type"] = "longrope"
            given[LENGTH] = values.get(LENGTH, self.length)
        plain = {name: value for name, value in values.items() if name != "rope_scaling"}
        settings = self.rope.read(plain | {"rope_parameters": given})
        part = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
        if not isinstance(part, int | float) or not 0 < part <= 1:
            raise InputError(f"partial_rotary_factor={part!r}: must be above 0, and at most 1")
        head = values.get("hidden_size", 3072) // values.get("num_attention_heads", 32)
        width = int((values.get("head_dim") or head) * part)
        return settings | {"layer.rotary.width": None if part == 1 else width}

    def write(self, config: Config) -> Values:
        layer = get(config, "layer")
        width = layer.rotary.width or layer.head_width
        part = width / layer.head_width
        while int(layer.head_width * part) < width:  # a quotient that was rounded down
            part = math.nextafter(part, math.inf)
        fields = self.rope.write(config)
        fields["rope_parameters"]["partial_rotary_factor"] = part
        if layer.rotary.scaling == "longrope":
            fields[LENGTH] = layer.rotary.original_max_len
        return fields


FIELDS = (
    Map("vocab_size", "vocab_size", 32064),
    Map("hidden_size", "layer.d_model", 3072),
    Map("intermediate_size", "layer.d_ff", 8192),
    Map("num_hidden_layers", "num_layers", 32),
    Map("num_attention_heads", "layer.num_heads", 32),
    Map("num_key_value_heads", "layer.num_kv_heads", None),
    Map("head_dim", "layer.head_dim", None, optional=True),
    Map("max_position_embeddings", "max_len", 4096),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-5),
    Map("sliding_window", "layer.window", None),
    Map("tie_word_embeddings", "tied", False),
    choice("hidden_act", "layer.activation", ACTIVATIONS, "silu"),
    LongRope(),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
    Require("resid_pdrop", 0.0, "dropout without that of attention weights is not built here"),
    Skip(("embd_pdrop",), "`transformers` does not read it"),
    *(
        Require(name, False, "its code has no such biases")
        for name in ("attention_bias", "mlp_bias", "lm_head_bias")
    ),
    Require("full_attn_mod", 1, "windows in some blocks are not in its code"),
    Skip(("interpolate_factor", "auto_map"), "about code that comes with the files"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `Phi3ForCausalLM`: `[Q | K | V]` and `[gate | up]` are one each."""
    layer, ours = "model.layers.{i}.", "layers.{i}."
    queries, keys = (
        heads * config.layer.head_width for heads in (config.layer.num_heads, config.layer.kv_heads)
    )
    return (
        Rule(
            layer + "self_attn.qkv_proj.weight",
            tuple(f"{ours}self_attn.{name}_proj.kernel" for name in "qkv"),
            (Split((queries, keys, keys)), Transpose()),
        ),
        Rule(
            layer + "mlp.gate_up_proj.weight",
            (ours + "ffn.gate_proj.kernel", ours + "ffn.up_proj.kernel"),
            (Split((config.layer.d_ff, config.layer.d_ff)), Transpose()),
        ),
        *llama.rules(config),
    )


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=FIXED | {"layer.qkv_bias": False, "layer.out_bias": False, "layer.ffn_bias": False},
    rules=rules,
)
