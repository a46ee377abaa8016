"""Gemma 3 (text): Gemma 2 with norms on queries and keys instead of a cap on scores, and a rotation
of their own for the blocks with a window, five in six."""

import dataclasses

from jax_transformer.config import DecoderOnlyConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.families import llama
from jax_transformer.porting.families.base import Config, Family, Map, Require, Skip, Values, choice
from jax_transformer.porting.families.gemma import CAUSAL, SCALED
from jax_transformer.porting.families.gemma2 import NORMS, SCALE
from jax_transformer.porting.families.llama import ACTIVATIONS, ORDER
from jax_transformer.porting.families.qwen3 import QUERY_KEY_NORM
from jax_transformer.porting.families.rotary import Rope
from jax_transformer.porting.families.windows import FULL, SLIDING, Types, Windows
from jax_transformer.porting.rules import Rules

PATTERN = ("_sliding_window_pattern", "sliding_window_pattern")
GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


def five_in_six(values: Values) -> Types:
    """The types of the blocks where the file does not list them."""
    every = values.get("sliding_window_pattern", 6)
    count = values["num_hidden_layers"]
    return [SLIDING if (index + 1) % every else FULL for index in range(count)]


@dataclasses.dataclass(frozen=True)
class WindowsAndRotations:
    """`layer_types` and the rotation of each type: nested in `rope_parameters` under its name; in
    old files `rope_theta` and `rope_scaling` of blocks without a window, `rope_local_base_freq` of
    those with one."""

    windows: Windows

    @property
    def fields(self) -> tuple[str, ...]:
        names = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
        return (*self.windows.fields, *names, "default_theta")

    def read(self, values: Values) -> Values:
        settings = self.windows.read(values)
        parameters = values.get("rope_parameters") or {}
        unknown = [name for name in parameters if name not in (FULL, SLIDING)]
        if unknown:
            raise InputError(f"rope_parameters.{unknown[0]}: must be under {FULL} or {SLIDING}")
        whole = values | {"rope_parameters": parameters.get(FULL)}
        local = {
            "rope_parameters": parameters.get(SLIDING),
            "rope_theta": values.get("rope_local_base_freq"),
            "max_position_embeddings": values.get("max_position_embeddings"),
        }
        if settings["local_layers"]:
            settings |= Rope("layer.rotary", GLOBAL_BASE).read(whole)
            return settings | Rope("local_layer.rotary", LOCAL_BASE).read(local)
        if settings["layer.window"] is None:
            return settings | Rope("layer.rotary", GLOBAL_BASE).read(whole)
        return settings | Rope("layer.rotary", LOCAL_BASE).read(local)

    def write(self, config: Config) -> Values:
        assert isinstance(config, DecoderOnlyConfig)
        parameters: Values = {
            FULL: {"rope_theta": GLOBAL_BASE, "rope_type": "default"},
            SLIDING: {"rope_theta": LOCAL_BASE, "rope_type": "default"},
        }
        for part in ("layer", "local_layer"):
            layer = getattr(config, part)
            if layer is not None:
                kind = FULL if layer.window is None else SLIDING
                parameters[kind] = Rope(f"{part}.rotary").write(config)["rope_parameters"]
        return self.windows.write(config) | {"rope_parameters": parameters}


FIELDS = (
    Map("vocab_size", "vocab_size", 262208),
    Map("hidden_size", "layer.d_model", 2304),
    Map("intermediate_size", "layer.d_ff", 9216),
    Map("num_hidden_layers", "num_layers", 26),
    Map("num_attention_heads", "layer.num_heads", 8),
    Map("num_key_value_heads", "layer.num_kv_heads", 4),
    Map("head_dim", "layer.head_dim", 256),
    Map("max_position_embeddings", "max_len", 131072),
    Map("rms_norm_eps", "layer.norm_epsilon", 1e-6),
    Map("attention_bias", ("layer.qkv_bias", "layer.out_bias"), False),
    Map("final_logit_softcapping", "logit_soft_cap", None),
    Map("tie_word_embeddings", "tied", True),
    SCALE,
    choice("hidden_activation", "layer.activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    WindowsAndRotations(Windows(five_in_six, other_fields=PATTERN)),
    CAUSAL,
    Skip(("attn_logit_softcapping",), "Gemma 3's attention does not read it"),
    Require("attention_dropout", 0.0, "dropout of attention weights alone is not built here"),
)


def rules(config: DecoderOnlyConfig) -> Rules:
    """Tensor names of `Gemma3ForCausalLM`: the first rule about a name counts."""
    return (*NORMS, *QUERY_KEY_NORM, *llama.rules(config))


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    config=DecoderOnlyConfig,
    fields=FIELDS,
    fixed=SCALED | {"layer.placement": "sandwich", "layer.query_key_norm": "head"},
    rules=rules,
    order=ORDER,
)
