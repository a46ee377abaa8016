"""How far two arrays are apart, and how far that is to be taken seriously."""

import dataclasses
from typing import Any

import numpy as np

SAME_FUNCTION = 1e-12
"""Relative norm-wise difference of two float64 results of one function; the measured floor of deep
models is about 1e-14."""

FACTOR = {"float32": 2.0, "bfloat16": 1.2, "float16": 1.2}
"""In a narrow dtype: the error against float64 that is allowed, over the reference's own. (XLA's
`erf` and `tanh` on a CPU carry 3.3 times PyTorch's rms error, within 5 ulp; the rest is level.)"""

ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
ALLOWED_ULP = 4.0


def relative_error(found: Any, expected: Any, valid: np.ndarray | None = None) -> float:
    """`|found - expected| / |expected|` (Euclidean norms); inf for NaN or infinity on either side,
    and for another shape, unless it has as many elements for each row, or one row for all: then
    in the same order.

    Args:
        valid: `[B, T]`, True at the tokens that count: arrays that begin with these axes are
            compared there only.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    if found.size != expected.size or found.shape[:1] not in (expected.shape[:1], (1,)):
        return np.inf
    found = found.reshape(expected.shape)
    found, expected = at_valid(found, valid), at_valid(expected, valid)
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return np.inf
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    difference, scale = np.linalg.norm(found - expected), np.linalg.norm(expected)
    if scale == 0.0:
        return 0.0 if difference == 0.0 else np.inf
    return float(difference / scale)


def at_valid(array: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
    """The part of `array` at the tokens that count, in the shape that is left."""
    if valid is None or array.shape[: valid.ndim] != valid.shape:
        return array
    return array[valid]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The errors of both sides against float64, relative to the rms of the float64 values."""

    ours: float
    theirs: float
    dtype: str

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        if self.theirs == 0.0:
            return 1.0 if self.ours == 0.0 else np.inf
        return self.ours / self.theirs

    @property
    def passed(self) -> bool:
        """At most `FACTOR` times theirs, plus 4 ulp at the tensor's scale."""
        allowed = FACTOR[self.dtype] * self.theirs + ALLOWED_ULP * ULP[self.dtype]
        return bool(self.ours <= allowed)


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Two next-token distributions."""

    kl: float
    """`sum_v p(v) ln(p(v) / q(v))` in nats, p the reference's, mean over tokens."""
    worst_kl: float
    """Of the token where it is largest."""
    top1: float
    """Fraction of tokens where both have the same most likely id."""


def compare_logits(found: Any, expected: Any, valid: np.ndarray | None = None) -> Distributions:
    """KL divergence over the whole vocabulary and top-1 agreement of logits `[B, T, V]`."""
    ours, theirs = (
        log_softmax(np.asarray(at_valid(np.asarray(x), valid), np.float64))
        for x in (found, expected)
    )
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    same = ours.argmax(axis=-1) == theirs.argmax(axis=-1)
    return Distributions(float(kl.mean()), float(kl.max()), float(same.mean()))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
