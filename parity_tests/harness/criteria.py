"""The two criteria, derived and not chosen."""

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.harness.cases import Case, is_float, run_jax, run_torch
from parity_tests.harness.weights import Tensors

FLOAT64_TOLERANCE = 1e-12
"""Of the tensor's norm. Measured: at most 2e-14 in every case of this suite."""

DRAWS = 8
"""Weights and vectors that the error in float32 is taken over. Rounding errors are chance: of one
draw, through a whole model, the rms error of a small tensor is up to 4.5 times PyTorch's and as
often that much below it, and its largest element varies more. Over 8 draws the median ratio is
1.0 and the largest 1.8."""


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0


def scale_of(name: str, truth: Tensors) -> np.ndarray:
    """The tensor on whose scale errors of `name` are measured: itself, but for key biases.

    A key bias adds the same to all scores of a query, which softmax does not see: its gradient
    is zero but for rounding, and is held against that of its kernel.
    """
    return truth[name.replace("k_proj.bias", "k_proj.weight")]


def assert_same_function(actual: Tensors, truth: Tensors) -> None:
    """Both in float64: each tensor within 1e-12 of the truth's norm."""
    assert actual.keys() == truth.keys()
    for name, expected in truth.items():
        found = actual[name]
        assert found.shape == expected.shape, name
        if not is_float(expected):
            np.testing.assert_array_equal(found, expected, err_msg=name)
            continue
        assert found.dtype == expected.dtype == np.float64, name
        error = np.linalg.norm(found - expected)
        limit = FLOAT64_TOLERANCE * np.linalg.norm(scale_of(name, truth))
        assert error <= limit, f"{name}: off by {error:.3g}, limit {limit:.3g}"


def assert_as_accurate(
    actual: Tensors, reference: Tensors, truth: Tensors, *, factor: float = 2.0
) -> None:
    """The rms error of each tensor at most `factor` times the reference's plus 4 float32 ulp."""
    assert actual.keys() == reference.keys() == truth.keys()
    for name, exact in truth.items():
        if not is_float(exact):
            np.testing.assert_array_equal(actual[name], exact, err_msg=name)
            continue
        found, allowed = rms(actual[name] - exact), rms(reference[name] - exact)
        limit = factor * allowed + 4 * np.spacing(np.float32(rms(scale_of(name, truth))))
        assert found <= limit, (
            f"{name}: rms error {found:.3g}, PyTorch's {allowed:.3g}, limit {limit:.3g}"
        )


def check_float64(case: Case, mode: str) -> None:
    """The two compute the same function."""
    assert_same_function(run_jax(case, jnp.float64, mode), run_torch(case, torch.float64))


def check_float32(case: Case, mode: str) -> None:
    """JAX is as accurate as PyTorch."""
    assert_as_accurate(
        run_jax(case, jnp.float32, mode, draws=DRAWS),
        run_torch(case, torch.float32, draws=DRAWS),
        run_torch(case, torch.float64, draws=DRAWS),
    )


def check_bfloat16(case: Case, mode: str) -> None:
    """As accurate with weights, inputs and computation in bfloat16."""
    narrow = torch.bfloat16
    assert_as_accurate(
        run_jax(case, jnp.bfloat16, mode, narrow, DRAWS),
        run_torch(case, narrow, narrow, DRAWS),
        run_torch(case, torch.float64, narrow, DRAWS),
        factor=1.2,
    )
