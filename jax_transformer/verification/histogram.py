"""How the errors of a tensor's elements are distributed: a few wrong ones, or all a little."""

import dataclasses
from typing import Any

import numpy as np

from jax_transformer.verification.compare import at_valid

LOWEST, HIGHEST = -18, 2
"""Decimal exponents of the first and the last border."""

PER_DECADE = 2
"""Bins of a power of ten."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Elements of both sides, by the size of their error.

    An error is `|x - truth|` over the rms of the truth. Bin `i` is from `10^borders[i]` to
    `10^borders[i + 1]`; what is beyond the borders is in the bins at the edges.
    """

    point: str
    dtype: str
    borders: tuple[float, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    exact: tuple[int, int]
    """Elements without an error: ours, theirs."""
    broken: tuple[int, int]
    """Elements that are NaN or infinite: ours, theirs."""


def make_histogram(
    point: str, dtype: str, truth: Any, ours: Any, theirs: Any, valid: np.ndarray | None = None
) -> Histogram | None:
    """Of the tensor at that point; None where the sides have it in different shapes, or it is 0."""
    truth, ours, theirs = (np.asarray(each, np.float64) for each in (truth, ours, theirs))
    if ours.size != truth.size or theirs.size != truth.size:
        return None
    truth, ours, theirs = (
        at_valid(each.reshape(truth.shape), valid).ravel() for each in (truth, ours, theirs)
    )
    scale = np.sqrt(np.mean(truth**2))
    if not (np.isfinite(scale) and scale > 0):
        return None
    borders = np.arange(LOWEST * PER_DECADE, HIGHEST * PER_DECADE + 1) / PER_DECADE
    counted = [count(np.abs(each - truth) / scale, borders) for each in (ours, theirs)]
    (mine, exact, broken), (their, their_exact, their_broken) = counted
    return Histogram(
        point,
        dtype,
        tuple(borders.tolist()),
        mine,
        their,
        (exact, their_exact),
        (broken, their_broken),
    )


def count(errors: np.ndarray, borders: np.ndarray) -> tuple[tuple[int, ...], int, int]:
    """Elements in each bin, without an error, and without a value."""
    finite = errors[np.isfinite(errors)]
    exponents = np.log10(finite[finite > 0])
    inside = np.clip(exponents, borders[0], np.nextafter(borders[-1], -np.inf))
    counts = np.histogram(inside, borders)[0]
    return tuple(counts.tolist()), int((finite == 0).sum()), int(errors.size - finite.size)
