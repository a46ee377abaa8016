"""Biases by position: ALiBi's slopes for any number of heads, T5's buckets at any distance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from jax_transformer.errors import InputError
from jax_transformer.layers import position_bias
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    to_numpy,
)
from parity_tests.inputs import SOURCE_POSITIONS, TARGET_POSITIONS, S, T, padding
from torch_reference.layers import position_bias as reference

POSITIONS = {"query_positions": TARGET_POSITIONS, "key_positions": SOURCE_POSITIONS}

CASES = declare(
    *(
        Case(
            name=f"relative position bias, {'both ways' if bidirectional else 'causal'}",
            jax=position_bias.RelativePositionBias,
            torch=reference.RelativePositionBias,
            arguments=(6, 16, 40, bidirectional),
            inputs=POSITIONS,
            place="position_bias",
        )
        for bidirectional in (True, False)
    ),
    *(
        Case(
            name=f"ALiBi of {heads} heads",
            jax=position_bias.alibi_bias,
            torch=reference.alibi_bias,
            inputs=POSITIONS,
            options={"num_heads": heads},
        )
        # The slopes of 4 and 6 heads are exact in float32.
        for heads in (4, 6)
    ),
    *(
        Case(
            name=f"buckets, {'both ways' if bidirectional else 'causal'}",
            jax=position_bias.relative_position_bucket,
            torch=reference.relative_position_bucket,
            inputs={"relative": np.arange(-300, 301, dtype=np.int32)},
            options={"bidirectional": bidirectional},
        )
        for bidirectional in (True, False)
    ),
)


@pytest.mark.parametrize("mode", ["quick", "op by op"])
@pytest.mark.parametrize("case", [*CASES[:2], *CASES[4:]], ids=str)
def test_both_frameworks_compute_the_same_function(case, mode):
    check_float64(case, mode)


@pytest.mark.parametrize("mode", ["jit", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case, mode):
    check_float32(case, mode)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


def slopes_of_both(heads: int) -> list[np.ndarray]:
    return [
        position_bias.get_alibi_slopes(heads),
        reference.get_alibi_slopes(heads).numpy(),
    ]


def test_slopes_are_those_of_the_paper_s_code_for_any_number_of_heads():
    for slopes in slopes_of_both(6):
        expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
        np.testing.assert_array_equal(slopes, expected)
    for slopes in slopes_of_both(12):
        np.testing.assert_allclose(slopes[-4:], [0.70711, 0.35355, 0.17678, 0.08839], atol=5e-6)
    for slopes in slopes_of_both(8):
        np.testing.assert_array_equal(slopes, 2.0 ** -np.arange(1, 9))
    for slopes in slopes_of_both(1):
        np.testing.assert_array_equal(slopes, [2.0**-8])


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 12, 16, 40, 71])
def test_slopes_are_those_of_bloom(heads):
    # Over a mask of two tokens its bias is slope * [0, 1].
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1].numpy()
    for slopes in slopes_of_both(heads):
        # It computes in float32.
        np.testing.assert_allclose(slopes, theirs, rtol=1e-6)


def test_the_bias_is_minus_the_slope_times_the_distance():
    queries, keys = np.array([[2, 3]], np.int32), np.array([[0, 3, 7]], np.int32)
    distance = np.array([[2, 1, 5], [3, 0, 4]])
    expected = -np.array([0.0625, 0.00390625])[:, None, None] * distance
    found = position_bias.alibi_bias(jnp.asarray(queries), jnp.asarray(keys), 2)
    theirs = reference.alibi_bias(torch.from_numpy(queries), torch.from_numpy(keys), 2)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(theirs[0], expected)
    assert found.dtype == jnp.float32
    assert theirs.dtype == torch.float32


def test_alibi_in_float64_is_the_same_in_both():
    # No float among its inputs says so: the cases compute it in float32.
    with jax.enable_x64(True):
        queries, keys = jnp.asarray(TARGET_POSITIONS), jnp.asarray(SOURCE_POSITIONS)
        ours = to_numpy(position_bias.alibi_bias(queries, keys, 12, jnp.float64))
    theirs = reference.alibi_bias(
        torch.from_numpy(TARGET_POSITIONS), torch.from_numpy(SOURCE_POSITIONS), 12, torch.float64
    )
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-14)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_makes_bloom_s_weights_for_causal_rows_with_and_without_padding_on_the_left(heads):
    # BLOOM's bias differs by a number per row, which the softmax does not see.
    real = padding(S)[:3]
    real[1] = True
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0).astype(np.int32)
    mask = torch.from_numpy(real[:, None, None] & np.tril(np.ones((S, S), bool)))
    theirs = build_alibi_tensor(torch.from_numpy(real).long(), heads, torch.float64)
    theirs = theirs.reshape(len(real), heads, 1, S).masked_fill(~mask, -1e9).softmax(-1)
    ours = position_bias.alibi_bias(jnp.asarray(positions), jnp.asarray(positions), heads)
    ours = torch.from_numpy(to_numpy(ours)).double().masked_fill(~mask, -1e9).softmax(-1)
    rows = mask.any(-1)[:, 0]
    for head in range(heads):
        found, expected = (weights[:, head][rows] for weights in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def t5(*arguments: int | bool) -> position_bias.RelativePositionBias:
    return fresh(lambda: position_bias.RelativePositionBias(*arguments, rngs=nnx.Rngs(0)))


BIASES = {
    "ALiBi": lambda queries, keys: position_bias.alibi_bias(queries, keys, 6),
    "T5": lambda queries, keys: t5(6, 16, 40)(queries, keys),
    "T5 causal": lambda queries, keys: t5(6, 16, 40, False)(queries, keys),
}


@pytest.mark.parametrize("name", BIASES)
def test_one_query_of_a_cached_step_has_its_row_of_the_whole(name):
    # Left padding included: what counts are positions, not places.
    bias = BIASES[name]
    positions = jnp.asarray(SOURCE_POSITIONS)
    whole = bias(positions, positions)
    for step in range(S):
        row = bias(positions[:, step : step + 1], positions)
        np.testing.assert_array_equal(row[:, :, 0], whole[:, :, step])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [4, 16, 17, 30, 32, 64])
def test_buckets_are_those_of_t5_at_any_distance(bidirectional, buckets):
    relative = torch.arange(-1500, 1501)
    for distance in (33, 40, 100, 128, 256, 1000):
        options = (bidirectional, buckets, distance)
        expected = T5Attention._relative_position_bucket(relative, *options)
        ours = position_bias.relative_position_bucket(jnp.asarray(relative.numpy()), *options)
        theirs = reference.relative_position_bucket(relative, *options)
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(theirs, expected)


def test_near_distances_have_a_bucket_each_and_far_ones_share():
    relative = np.array([0, -1, -7, -8, -11, -12, -127, -128, -5000, 1, 8, 128, 5000])
    expected = [0, 1, 7, 8, 8, 9, 15, 15, 15, 17, 24, 31, 31]
    found = position_bias.relative_position_bucket(jnp.asarray(relative))
    np.testing.assert_array_equal(found, expected)
    causal = position_bias.relative_position_bucket(jnp.asarray(relative), bidirectional=False)
    np.testing.assert_array_equal(causal, [0, 1, 7, 8, 11, 12, 31, 31, 31, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("bidirectional", "buckets", "distance"),
    [(True, 3, 128), (True, 32, 8), (False, 1, 128), (False, 32, 16)],
)
@pytest.mark.parametrize("module", [position_bias, reference])
def test_buckets_that_cannot_be_are_refused(module, bidirectional, buckets, distance):
    with pytest.raises(InputError, match=f"num_buckets={buckets} with max_distance={distance}"):
        module.bucket_table(bidirectional, buckets, distance)


def test_the_bias_of_a_head_is_its_column_of_the_table():
    module = t5(2, 8, 20)
    table = module.relative_attention_bias.embedding[...]
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    bias = module(positions, positions)
    bucket = position_bias.relative_position_bucket(jnp.asarray(2 - 5), True, 8, 20)
    np.testing.assert_array_equal(bias[0, :, 5, 2], table[int(bucket)])
