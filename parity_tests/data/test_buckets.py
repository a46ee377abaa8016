"""Fitted buckets hold the rows in as few tokens as any choice of as many buckets could."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.data.buckets import fit_buckets


def whole_batches(lengths, widths, tokens_per_batch, row_multiple):
    """The tokens of the batches that hold `lengths` padded to `widths`, all rows counted."""
    total, shorter = 0, 0
    for width in widths:
        held = sum(shorter < length <= width for length in lengths)
        rows = max(tokens_per_batch // width // row_multiple, 1) * row_multiple
        total += -(-held // rows) * rows * width
        shorter = width
    return total


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=60),
    st.integers(1, 300),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_no_choice_of_as_many_buckets_takes_fewer_tokens(
    lengths, tokens_per_batch, row_multiple, max_buckets
):
    buckets = fit_buckets(
        np.array(lengths),
        tokens_per_batch=tokens_per_batch,
        row_multiple=row_multiple,
        max_buckets=max_buckets,
    )
    *shorter, longest = sorted({-(-length // 8) * 8 for length in lengths})
    fewest = min(
        whole_batches(lengths, (*widths, longest), tokens_per_batch, row_multiple)
        for count in range(max_buckets)
        for widths in combinations(shorter, count)
    )
    widths = [bucket.length for bucket in buckets]
    assert whole_batches(lengths, widths, tokens_per_batch, row_multiple) == fewest


def test_the_rows_of_a_bucket_are_spread_evenly_over_its_batches():
    # 9 rows of 8 tokens, at most 8 in a batch: 5 + 4, not 8 + 1.
    (bucket,) = fit_buckets(np.full(9, 8), tokens_per_batch=64)
    assert bucket == (8, 5)
    (bucket,) = fit_buckets(np.full(9, 8), tokens_per_batch=64, row_multiple=2)
    assert bucket == (8, 6)


def test_rows_of_few_lengths_take_few_buckets():
    lengths = np.array([3] * 100 + [20] * 100)
    assert [bucket.length for bucket in fit_buckets(lengths, tokens_per_batch=400)] == [8, 24]
