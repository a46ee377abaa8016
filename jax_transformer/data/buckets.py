"""The few shapes that batches have: fitted to the data for training, fixed for evaluation."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer.errors import InputError

# Padded lengths of training batches are multiples of this; those of evaluation batches are this
# times a power of two, which validation, test and a user's own sentences then share.
_LENGTH_MULTIPLE = 8
_SHORTEST_EVALUATION_LENGTH = 32


class Bucket(NamedTuple):
    """The shape of a batch: `rows` sentence pairs, both sides padded to `length` tokens."""

    length: int
    rows: int


def fit_buckets(
    lengths: Int[np.ndarray, " R"],
    *,
    tokens_per_batch: int,
    row_multiple: int = 1,
    max_length: int | None = None,
    max_buckets: int = 8,
) -> tuple[Bucket, ...]:
    """The at most `max_buckets` buckets that hold rows of these `lengths` in the fewest tokens.

    No length may be above `max_length`. Dynamic programming over the padded lengths that occur,
    w_1 < w_2 < ..., multiples of 8 (the longest may be `max_length` instead): with c(i, j) the
    padded tokens of all rows longer than w_i and at most w_j,

        best(k, j) = min over i < j of best(k - 1, i) + c(i, j).

    c counts whole batches, as one that is not full costs an optimizer step as well. The rows of a
    bucket are then spread evenly over its batches, so that few are left empty.
    """
    check_at_least(
        1, tokens_per_batch=tokens_per_batch, row_multiple=row_multiple, max_buckets=max_buckets
    )
    padded = _ceil_div(lengths, _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    widths, counts = np.unique(padded, return_counts=True)
    if max_length is not None:
        widths = np.minimum(widths, max_length)
    most_rows = _most_rows(widths, tokens_per_batch, row_multiple)

    up_to = np.concatenate([[0], np.cumsum(counts)])
    held = up_to[1:] - up_to[:-1, None]  # [i, j]: rows of widths[i] to widths[j]
    cost = np.where(held > 0, _ceil_div(held, most_rows) * most_rows * widths, np.inf)
    best, firsts = [cost[0]], [np.zeros(len(widths), int)]
    for _ in range(1, min(max_buckets, len(widths))):
        before = np.concatenate([[np.inf], best[-1][:-1]])  # [i]: all rows below widths[i]
        total = before[:, None] + cost
        firsts.append(total.argmin(axis=0))
        best.append(total.min(axis=0))

    cuts = int(np.argmin([tokens[-1] for tokens in best]))  # the fewest among the best
    buckets, last = [], len(widths) - 1
    for first_of in reversed(firsts[: cuts + 1]):
        first = first_of[last]
        even = _ceil_div(held[first, last], _ceil_div(held[first, last], most_rows[last]))
        rows = _ceil_div(even, row_multiple) * row_multiple
        buckets.append(Bucket(length=int(widths[last]), rows=int(rows)))
        last = first - 1
    return tuple(reversed(buckets))


def evaluation_layout(
    lengths: np.ndarray, tokens_per_batch: int, row_multiple: int, max_length: int | None
) -> list[tuple[Bucket, np.ndarray]]:
    """The shape and the rows of each evaluation batch, shortest rows first."""
    doublings = int(_ceil_div(lengths.max(), _SHORTEST_EVALUATION_LENGTH) - 1).bit_length()
    widths = _SHORTEST_EVALUATION_LENGTH << np.arange(doublings + 1)
    place = np.searchsorted(widths, lengths)
    if max_length is not None:
        widths = np.minimum(widths, max_length)
    batches = []
    for index, width in enumerate(widths):
        rows = np.flatnonzero(place == index)
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        if len(rows) == 0:
            continue
        # A power of two, so that sets of similar size share this shape too.
        needed = row_multiple << int(_ceil_div(len(rows), row_multiple) - 1).bit_length()
        height = min(needed, int(_most_rows(width, tokens_per_batch, row_multiple)))
        bucket = Bucket(length=int(width), rows=height)
        batches += [(bucket, rows[i : i + height]) for i in range(0, len(rows), height)]
    return batches


def check_at_least(least: int, **values: int) -> None:
    """Raise `InputError` for the first of the named `values` that is below `least`."""
    for name, value in values.items():
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")


def _most_rows(width: Any, tokens_per_batch: int, row_multiple: int) -> Any:
    """Rows of `width` tokens in a full batch."""
    return np.maximum(tokens_per_batch // width // row_multiple, 1) * row_multiple


def _ceil_div(number: Any, divisor: Any) -> Any:
    return -(-number // divisor)
