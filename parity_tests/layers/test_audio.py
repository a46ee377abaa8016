"""The convolutions over log-mel features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.layers import audio
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    to_numpy,
)
from parity_tests.inputs import B, D, S, normal
from torch_reference.layers import audio as reference

MELS = 5

CASES = declare(
    *(
        Case(
            name=f"{frames} frames",
            jax=audio.AudioEmbedding,
            torch=reference.AudioEmbedding,
            arguments=(D, MELS),
            inputs={"features": normal(B, frames, MELS)},
            place="encoder.embedding",
        )
        for frames in (1, 2, 17, 18)
    ),
    *(
        Case(
            name=f"convolution of stride {stride}",
            jax=audio.Conv1d,
            torch=reference.Conv1d,
            arguments=(MELS, D, stride),
            inputs={"x": normal(B, S, MELS)},
            place="conv",
        )
        for stride in (1, 2)
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


def test_both_frameworks_compute_the_same_function_op_by_op():
    check_float64(CASES[2], "op by op")


@pytest.mark.parametrize("case", CASES[2:4], ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit")


def test_in_bfloat16_jax_is_as_accurate_as_pytorch():
    check_bfloat16(CASES[3], "quick")


def test_a_convolution_is_its_formula_with_zeros_beyond_both_ends():
    x = np.array([1.0, 10.0, 100.0, 1000.0])[None, :, None]
    for stride, expected in ((1, [32, 321, 3210, 2100]), (2, [32, 3210])):
        conv = fresh(lambda stride=stride: audio.Conv1d(1, 1, stride, rngs=nnx.Rngs(0)))
        conv.kernel[...] = jnp.asarray([1.0, 2.0, 3.0]).reshape(3, 1, 1)
        conv.bias[...] = jnp.zeros(1)
        np.testing.assert_array_equal(conv(jnp.asarray(x))[0, :, 0], expected)


def test_new_kernels_are_as_large_as_those_of_pytorch():
    ours = audio.Conv1d(40, 60, rngs=nnx.Rngs(0))
    theirs = reference.Conv1d(40, 60)
    torch.nn.init.xavier_uniform_(theirs.weight)
    for bound, *parameters in (
        ((6 / 300) ** 0.5, ours.kernel[...], theirs.weight),
        (120**-0.5, ours.bias[...], theirs.bias),
    ):
        for parameter in parameters:
            # The largest of 60 uniform numbers, or of more.
            assert 0.9 * bound < np.abs(to_numpy(parameter)).max() <= np.float32(bound)


def test_features_are_read_in_the_dtype_of_the_parameters():
    features = normal(1, 4, MELS)
    for dtype in ("bfloat16", "float64"):
        with jax.enable_x64(True):
            module = fresh(lambda: audio.AudioEmbedding(D, MELS, rngs=nnx.Rngs(0)), dtype)
            assert module(jnp.asarray(features)).dtype == dtype
        theirs = reference.AudioEmbedding(D, MELS).to(getattr(torch, dtype))
        assert theirs(torch.from_numpy(features)).dtype == getattr(torch, dtype)


def test_two_frames_become_one():
    module = fresh(lambda: audio.AudioEmbedding(D, MELS, rngs=nnx.Rngs(0)))
    for frames, length in ((1, 1), (2, 1), (3, 2), (3000, 1500)):
        shape = jax.eval_shape(module, jnp.zeros((1, frames, MELS))).shape
        assert shape == (1, length, D)
        theirs = reference.AudioEmbedding(D, MELS)(torch.zeros(1, frames, MELS))
        assert to_numpy(theirs).shape == shape
