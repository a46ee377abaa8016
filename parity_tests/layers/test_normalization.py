"""LayerNorm: the same function in both frameworks, epsilon included."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.layers import normalization
from jax_transformer.models.parameters import cast_model
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    to_numpy,
)
from parity_tests.inputs import B, D, T, normal
from torch_reference.layers import normalization as reference


def rows() -> np.ndarray:
    """Common rows, and rows where epsilon decides: of variance 1e-5, 2.5e-7 and 0."""
    x = normal(B, T, D)
    x[0, 0] *= 1e-5**0.5
    x[0, 1] = np.tile([0.0, 1e-3], D // 2)
    x[0, 2] = 0.5
    x[0, 3] = 0.0
    x[1, 0] *= 1e4
    x[1, 1] += 100.0
    return x


CASES = declare(
    Case(
        name="layer norm",
        jax=normalization.LayerNorm,
        torch=reference.LayerNorm,
        arguments=(D,),
        inputs={"x": rows()},
        place="encoder.norm",
    ),
    Case(
        name="layer norm of another epsilon",
        jax=normalization.LayerNorm,
        torch=reference.LayerNorm,
        arguments=(D, 0.5),
        inputs={"x": rows()},
        place="encoder.norm",
    ),
)


@pytest.mark.parametrize("mode", ["quick", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case, mode):
    check_float64(case, mode)


@pytest.mark.parametrize("mode", ["jit", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case, mode):
    check_float32(case, mode)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


@pytest.mark.parametrize(("epsilon", "top"), [(1e-5, 0.15617), (1e-6, 0.44721)])
def test_epsilon_is_added_to_the_variance(epsilon, top):
    x = np.tile([0.0, 1e-3], 4).astype(np.float32)[None]
    ours = normalization.LayerNorm(8, epsilon)(jnp.asarray(x))
    theirs = reference.LayerNorm(8, epsilon)(torch.from_numpy(x))
    # Five digits are given.
    assert to_numpy(ours).max() == pytest.approx(top, abs=5e-6)
    assert to_numpy(theirs).max() == pytest.approx(top, abs=5e-6)


def test_epsilon_is_that_of_pytorch_in_both_by_default():
    assert normalization.LayerNorm(8).epsilon == reference.LayerNorm(8).eps == 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_are_in_float32_whatever_the_dtype(dtype):
    # An outlier among ones: summed in bfloat16 the mean of 4096 ones stalls at 256.
    x = np.ones((1, 4096), np.float32)
    x[0, 0] = 300.0
    exact = (x.astype(np.float64) - x.mean(dtype=np.float64)) / np.sqrt(
        x.var(dtype=np.float64) + 1e-5
    )
    ours = cast_model(normalization.LayerNorm(4096), dtype)(jnp.asarray(x, dtype))
    theirs = reference.LayerNorm(4096).to(getattr(torch, dtype))(
        torch.from_numpy(x).to(getattr(torch, dtype))
    )
    assert ours.dtype == jnp.dtype(dtype)
    # Half an ulp of the output's own dtype is all that is lost.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(to_numpy(ours), exact, rtol=1.01 * half_ulp)
    np.testing.assert_allclose(to_numpy(theirs), exact, rtol=1.01 * half_ulp)
