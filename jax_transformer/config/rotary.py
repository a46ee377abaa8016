"""Rotary positions: what a model's rotation is, in plain Python."""

import dataclasses
import math
from typing import Literal

from jax_transformer.config.checks import (
    check_above_zero,
    check_choice,
    check_optional_above_zero,
    check_optional_positive,
    is_number,
)
from jax_transformer.errors import InputError

RotaryPairing = Literal["adjacent", "half"]
RotaryScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]

# The settings that each scaling reads; any other must be at its default.
READ: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_len"),
    "llama3": ("factor", "original_max_len", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_len",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "factor",
        "original_max_len",
        "attention_factor",
        "short_factors",
        "long_factors",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """The rotation of queries and keys by their positions (Su et al. 2021; lecture section 4.4).

    Pair r of a head turns by `position * base^(-2r/R)`, R the rotated width; the scalings change
    these frequencies for contexts longer than those of the training.
    """

    pairing: RotaryPairing = "half"
    """`adjacent`: pairs (0, 1), (2, 3), ... (the paper, the lecture, GPT-J). `half`: pairs
    (r, r + R/2) (GPT-NeoX, Llama in Hugging Face's layout)."""
    base: float = 10000.0
    """Base of the geometric series of frequencies."""
    width: int | None = None
    """Leading features R of each head that are rotated, an even number; None for all."""
    scaling: RotaryScaling = "none"
    """`linear`: every frequency / factor. `dynamic`: the base grows with the length (NTK).
    `llama3`: long waves / factor, short ones as they are. `yarn`: Peng et al. 2023. `longrope`:
    each frequency / a factor of its own, short sequences others than long (Ding et al. 2024)."""
    factor: float = 1.0
    """By how much the context is stretched."""
    original_max_len: int | None = None
    """Length of the contexts of the training (all scalings but `linear`)."""
    low_freq_factor: float = 1.0
    """`llama3`: waves longer than original_max_len / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """`llama3`: waves shorter than original_max_len / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """`yarn`: pairs that turn more often than this in original_max_len are left alone."""
    beta_slow: float = 1.0
    """`yarn`: pairs that turn less often than this in original_max_len are stretched in full."""
    attention_factor: float | None = None
    """`yarn`, `longrope`: what cosines and sines are multiplied with; None: 0.1 ln(factor) + 1, or
    sqrt(1 + ln(factor) / ln(original_max_len))."""
    mscale: float | None = None
    """`yarn`: with mscale_all_dim, the attention factor is the quotient of
    0.1 mscale ln(factor) + 1 and 0.1 mscale_all_dim ln(factor) + 1 (DeepSeek)."""
    mscale_all_dim: float | None = None
    """See `mscale`."""
    truncate: bool = True
    """`yarn`: round the borders between the bands of pairs to whole pairs."""
    short_factors: tuple[float, ...] | None = None
    """`longrope`: what the frequency of each pair is divided by, up to original_max_len."""
    long_factors: tuple[float, ...] | None = None
    """`longrope`: the same for sequences beyond it."""

    def __post_init__(self) -> None:
        check_choice(self, "pairing", RotaryPairing)
        check_choice(self, "scaling", RotaryScaling)
        check_above_zero(
            self, "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "base"
        )
        check_optional_positive(self, "width", "original_max_len")
        check_optional_above_zero(self, "attention_factor", "mscale", "mscale_all_dim")
        if self.base <= 1.0:
            raise InputError(f"base={self.base!r}: must be above 1")
        if self.width is not None and self.width % 2:
            raise InputError(f"width={self.width}: features turn in pairs, give an even number")
        self.check_scaling()

    def check_scaling(self) -> None:
        """Raise InputError where a setting is not read, missing or out of range."""
        read = READ[self.scaling]
        for field in dataclasses.fields(self):
            place = sorted(name for name, names in READ.items() if field.name in names)
            value = getattr(self, field.name)
            if place and field.name not in read and value != field.default:
                raise InputError(
                    f"{field.name}={value!r} with scaling={self.scaling!r}: only "
                    f"{', '.join(place)} read it: leave it out or choose one of these"
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise InputError(
                f"mscale={self.mscale!r} with mscale_all_dim={self.mscale_all_dim!r}: "
                f"give both or neither"
            )
        if "original_max_len" in read and self.original_max_len is None:
            raise InputError(
                f"original_max_len=None with scaling={self.scaling!r}: give the length of the "
                f"contexts that the model was trained on"
            )
        if self.scaling == "longrope":
            self.check_factors()
        if self.scaling == "dynamic" and self.factor < 1:
            raise InputError(f"factor={self.factor!r} with scaling='dynamic': must be at least 1")
        if self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"low_freq_factor={self.low_freq_factor!r} is not below "
                f"high_freq_factor={self.high_freq_factor!r}: the long waves are the slow ones"
            )
        if self.beta_slow >= self.beta_fast:
            raise InputError(
                f"beta_slow={self.beta_slow!r} is not below beta_fast={self.beta_fast!r}: "
                f"the slow pairs turn less often"
            )

    def check_factors(self) -> None:
        """Raise InputError unless `longrope` has the factors of each pair."""
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not factors or not all(is_number(f) and 0 < f < math.inf for f in factors):
                raise InputError(f"{name}={factors!r}: give a finite number above 0 for each pair")
            if len(factors) != len(self.short_factors or ()):
                raise InputError(
                    f"{len(factors)} {name} and {len(self.short_factors or ())} short_factors: "
                    f"each pair has one of both"
                )
        if self.original_max_len == 1:
            raise InputError("original_max_len=1 with scaling='longrope': must be at least 2")
