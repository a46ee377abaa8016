"""`rope_theta`, `rope_scaling` and `rope_parameters`: one meaning in three spellings."""

import dataclasses
from typing import Any

from jax_transformer.config.rotary import READ
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config, Values, get

# Theirs -> ours.
TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
}
SETTINGS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
NEEDS_LENGTH = ("dynamic", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of `target` (a `RotaryConfig`'s dotted name).

    A file may say the base as `rope_theta` and the scaling as `rope_scaling` with `rope_type` or
    `type`, or all in `rope_parameters`. A setting that no scaling reads is refused.

    Args:
        target: `layer.rotary`.
        base: where the file says none.
        length: the field with the length of the contexts of the training, where the scaling
            needs one and does not say it itself.
    """

    target: str = "layer.rotary"
    base: float = 10000.0
    length: str = "max_position_embeddings"

    @property
    def fields(self) -> tuple[str, ...]:
        return ("rope_theta", "rope_scaling", "rope_parameters", "default_theta")

    def read(self, values: Values) -> Values:
        given: Values = {}
        for part in ("rope_scaling", "rope_parameters"):
            given |= values.get(part) or {}
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        base = given.pop("rope_theta", None) or values.get("rope_theta") or self.base
        if "partial_rotary_factor" in given:
            given.pop("partial_rotary_factor")  # an entry of its own reads it
        if kind not in TYPES:
            raise InputError(f"rope_type={kind!r}: must be one of {', '.join(TYPES)}")
        unknown = [name for name in given if name not in SETTINGS]
        if unknown:
            raise InputError(f"{unknown[0]}={given[unknown[0]]!r} of {kind} is not known")
        settings: Values = {"base": float(base), "scaling": TYPES[kind]}
        settings |= {
            SETTINGS[name]: as_ours(SETTINGS[name], value) for name, value in given.items()
        }
        if TYPES[kind] in NEEDS_LENGTH and settings.get("original_max_len") is None:
            settings["original_max_len"] = values.get(self.length)
        if kind == "longrope" and settings.get("factor") is None:
            length, original = values.get(self.length), settings["original_max_len"]
            settings["factor"] = length / original if length and original else 1.0
        if TYPES[kind] == "none":
            settings = {"base": settings["base"], "scaling": "none"}
        return {f"{self.target}.{name}": value for name, value in settings.items()}

    def write(self, config: Config) -> Values:
        rotary = get(config, self.target)
        theirs = {ours: name for name, ours in TYPES.items()}
        parameters: Values = {"rope_theta": rotary.base, "rope_type": theirs[rotary.scaling]}
        defaults = {field.name: field.default for field in dataclasses.fields(rotary)}
        for name, ours in SETTINGS.items():
            value = getattr(rotary, ours)
            if value != defaults[ours] or (ours in READ[rotary.scaling] and value is not None):
                parameters[name] = list(value) if isinstance(value, tuple) else value
        return {"rope_parameters": parameters}


def as_ours(name: str, value: Any) -> Any:
    """Files write 8 where 8.0 is meant; a length stays whole. A list is a tuple here."""
    if isinstance(value, list):
        return tuple(as_ours(name, each) for each in value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and name != "original_max_len" else value
