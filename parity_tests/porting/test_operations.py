"""Operations change the layout of tensors and nothing else, and can be undone."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import (
    AddConstant,
    Concatenate,
    Each,
    MergeHeads,
    Pad,
    Reshape,
    RopePairing,
    Slice,
    Split,
    SplitHeads,
    Stack,
    Transpose,
    Unstack,
    apply_all,
    contiguous,
    invert,
    shapes_of,
)

DTYPES = [np.float32, np.float16, np.int32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
sizes = st.integers(1, 4)


@st.composite
def axis_and_rest(draw, size):
    """A shape with `size` somewhere, and where."""
    rest = draw(st.lists(st.integers(0, 3), max_size=2))
    axis = draw(st.integers(0, len(rest)))
    return (*rest[:axis], size, *rest[axis:]), axis


@st.composite
def heads(draw):
    count, width = draw(sizes), draw(sizes)
    shape, axis = draw(axis_and_rest(count * width))
    return SplitHeads(count, axis), [shape]


@st.composite
def rope(draw):
    count, half, still = draw(sizes), draw(sizes), draw(st.integers(0, 2))
    shape, axis = draw(axis_and_rest(count * (2 * half + still)))
    rotated = 2 * half if still else draw(st.sampled_from([2 * half, None]))
    return RopePairing(count, draw(st.sampled_from(["adjacent", "half"])), rotated, axis), [shape]


@st.composite
def split(draw):
    parts = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    groups = draw(st.integers(1, 3))
    shape, axis = draw(axis_and_rest(groups * sum(parts)))
    return Split(parts, axis, groups), [shape]


@st.composite
def unstack(draw):
    count = draw(sizes)
    shape, axis = draw(axis_and_rest(count))
    return Unstack(count, axis), [shape]


@st.composite
def reshape(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return Reshape(shape, (math.prod(shape),)), [shape]


@st.composite
def pad(draw):
    shape, axis = draw(axis_and_rest(draw(st.integers(0, 3))))
    value = draw(st.sampled_from([0.0, 1.0]))
    return Pad(draw(st.integers(0, 2)), draw(st.integers(0, 2)), axis, value), [shape]


@st.composite
def each(draw):
    return Each(((Transpose(),), (SplitHeads(2),), ())), [(draw(sizes), 3), (4,), ()]


transposes = st.lists(st.integers(0, 5), max_size=3).map(lambda s: (Transpose(), [tuple(s)]))
forward = st.one_of(
    transposes, heads(), rope(), split(), unstack(), reshape(), pad(), each()
)  # fmt: skip


@st.composite
def cases(draw):
    """An operation, and tensors of random bits that it can be applied to, strided ones too."""
    operation, shapes = draw(forward)
    if draw(st.booleans()):
        # The padding that a slice takes away is not random.
        padded = isinstance(operation, Pad)
        operation, shapes = (operation.inverse(), list(operation.shapes(shapes)))
        if padded:
            operation = Slice(0, 0, operation.axis)
    dtype, seed = np.dtype(draw(st.sampled_from(DTYPES))), draw(st.integers(0, 99))
    strided = draw(st.booleans())
    return operation, [random_bits(shape, dtype, seed, strided) for shape in shapes]


def random_bits(shape, dtype, seed=0, strided=False):
    size = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if strided:
        return data.view(dtype).reshape(shape[::-1]).T
    return data.view(dtype).reshape(shape)


def same(first, second):
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_inverse_gives_back_every_bit(case):
    operation, arrays = case
    there = operation.apply_all(arrays)
    back = operation.inverse().apply_all(there)
    assert len(back) == len(arrays)
    assert all(same(*pair) for pair in zip(back, arrays, strict=True))
    assert operation.inverse().inverse() == operation
    # No number is lost, made or changed, unless rows are added.
    if not isinstance(operation, Pad):
        elements = [np.concatenate([sorted_bits(a) for a in x]) for x in (arrays, there)]
        assert np.array_equal(np.sort(elements[0]), np.sort(elements[1]))


def sorted_bits(array):
    return np.frombuffer(array.tobytes(), f"u{array.dtype.itemsize}")


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_shape_rule_is_what_applying_does(case):
    operation, arrays = case
    results = operation.apply_all(arrays)
    assert [a.shape for a in results] == list(operation.shapes([a.shape for a in arrays]))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_results_are_contiguous_in_memory(case):
    # Writers that store raw memory would store a view's as it was.
    operation, arrays = case
    for array in apply_all((operation,), arrays):
        assert array.flags.c_contiguous
    assert contiguous(np.array(1.0)).shape == ()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200))
def test_blocks_of_a_large_transpose_fit_together(rows, columns):
    matrix = np.arange(rows * columns).reshape(rows, columns)
    np.testing.assert_array_equal(Transpose().apply(matrix), matrix.T)


def test_fused_projections_come_apart_head_by_head_group_by_group_or_in_thirds():
    rows = np.arange(12)
    # Two heads of width 2, q k v of each head: GPT-NeoX and BLOOM.
    q, k, v = Split((2, 2, 2), groups=2).apply_all((rows,))
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])
    # Two groups of two query heads of width 1, one key and one value head each.
    q, k, v = Split((4, 1, 1), groups=2).apply_all((rows,))
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11])
    # Flat blocks: GPT-2, MPT.
    q, k, v = Split((4, 4, 4)).apply_all((rows,))
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])


def test_key_value_heads_keep_their_order():
    # Query heads 0 and 1 belong to key-value head 0: groups come apart as they lie, not tiled.
    rows = np.repeat([0, 0, 100, 1, 1, 101], 2)
    q, k = Split((4, 2), groups=2).apply_all((rows,))
    assert q.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert k.tolist() == [100, 100, 101, 101]


def test_rope_rows_are_paired_as_a_literal_table():
    half = np.array([0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 18, 19])  # two heads, four of six turn
    adjacent = RopePairing(2, "adjacent", 4).apply(half)
    assert adjacent.tolist() == [0, 2, 1, 3, 8, 9, 10, 12, 11, 13, 18, 19]
    whole = RopePairing(2, "adjacent").apply(half)
    assert whole.tolist() == [0, 3, 1, 8, 2, 9, 10, 13, 11, 18, 12, 19]


def test_rope_angles_meet_the_same_rows_in_either_pairing():
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((8, 5)), rng.standard_normal(5)
    angles = rng.standard_normal(2)
    turn = np.exp(1j * angles)

    def rotate_half(rows):
        first, second = rows.reshape(2, 2, 2).transpose(1, 0, 2)
        return (first + 1j * second) * turn

    def rotate_adjacent(rows):
        return rows.reshape(2, 2, 2) @ [1, 1j] * turn

    adjacent = RopePairing(2, "adjacent").apply(weight) @ x
    np.testing.assert_allclose(rotate_adjacent(adjacent), rotate_half(weight @ x), rtol=1e-12)


def test_a_scale_stored_as_one_plus_w_is_exact_where_the_sum_is():
    w = np.arange(-8, 8, dtype=np.float32) / 8
    stored = AddConstant(1).apply(w)
    assert stored.dtype == np.float32
    assert same(AddConstant(1).inverse().apply(stored), w)


def test_rows_that_are_not_padding_are_not_dropped():
    rows = np.arange(6.0).reshape(3, 2)
    with pytest.raises(InputError, match="would drop rows"):
        Slice(after=1).apply(rows)
    padded = Pad(before=1, after=2).apply(rows)
    assert same(Slice(before=1, after=2).apply(padded), rows)
    with pytest.raises(InputError, match="would drop rows"):
        Slice(before=2, after=2).apply(padded)
    # A negative zero is not the padding.
    padded[0] = -0.0
    with pytest.raises(InputError, match="would drop rows"):
        Slice(before=1, after=2).apply(padded)


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (Reshape((2, 3), (6,)), [(3, 2)]),
        (SplitHeads(2), [(3, 4)]),
        (SplitHeads(2, axis=1), [(4,)]),
        (MergeHeads(2), [(3, 4)]),
        (RopePairing(2, "half"), [(6,)]),
        (RopePairing(2, "half"), [(7,)]),
        (RopePairing(2, "half", 6), [(8,)]),
        (RopePairing(2, "half", 3), [(8,)]),
        (Slice(2, 2), [(3,)]),
        (Split((1, 2)), [(4,)]),
        (Split((1, 2), groups=2), [(3,)]),
        (Split((1, 2)), [(3,), (3,)]),
        (Concatenate((1, 2)), [(1,)]),
        (Concatenate((1, 2)), [(2,), (1,)]),
        (Concatenate((1, 2)), [(1, 3), (2, 4)]),
        (Stack(2), [(1,), (2,)]),
        (Stack(2), [(1,)]),
        (Stack(2, axis=2), [(1,), (1,)]),
        (Unstack(2), [(3,)]),
        (Each(((), ())), [(1,)]),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused_in_one_line(operation, shapes):
    with pytest.raises(InputError) as refusal:
        operation.shapes(shapes)
    assert "\n" not in str(refusal.value)


def test_a_reshape_keeps_the_number_of_elements():
    with pytest.raises(ValueError, match="number of elements"):
        Reshape((2, 3), (5,))


def test_a_chain_is_undone_from_its_end():
    chain = (
        Split((4, 2, 2)),
        Each(((RopePairing(2, "adjacent"), Transpose()), (), (Transpose(),))),
    )
    weight = random_bits((8, 3), np.dtype(np.float32))
    parts = apply_all(chain, (weight,))
    assert [part.shape for part in parts] == [(3, 4), (2, 3), (3, 2)]
    assert shapes_of(chain, [(8, 3)]) == tuple(part.shape for part in parts)
    (back,) = apply_all(invert(chain), parts)
    assert same(back, weight)
