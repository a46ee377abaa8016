"""The feed-forward network and its activations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.layers import feedforward
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    to_numpy,
)
from parity_tests.inputs import B, D, F, T, normal
from torch_reference.layers import feedforward as reference

# Zero is where ReLU has a corner, and far out GELU is x or nothing.
GRID = np.concatenate([np.linspace(-4, 4, 801), [-60, -13, -6, 6, 13, 60]]).astype(np.float32)

CASES = declare(
    *(
        Case(
            name=f"{activation} network",
            jax=feedforward.FeedForward,
            torch=reference.FeedForward,
            arguments=(D, F, 0.1, activation),
            inputs={"x": normal(B, T, D)},
            place="encoder.layers.0.ffn",
        )
        for activation in ("gelu", "relu")
    ),
    *(
        Case(
            name=activation,
            jax=feedforward.activate,
            torch=reference.activate,
            inputs={"x": GRID},
            options={"activation": activation},
        )
        for activation in ("gelu", "relu")
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


def test_gelu_is_the_exact_form():
    with jax.enable_x64(True):
        x = GRID.astype(np.float64)
        exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x])
        ours = to_numpy(feedforward.activate(jnp.asarray(x), "gelu"))
        theirs = reference.activate(torch.from_numpy(x), "gelu").numpy()
        tanh = to_numpy(jax.nn.gelu(jnp.asarray(x), approximate=True))
    # 1 + erf(x) cancels for negative x: an error of one ulp of 1, times x.
    np.testing.assert_allclose(ours, exact, rtol=0, atol=60 * 2.0**-53)
    np.testing.assert_allclose(theirs, exact, rtol=0, atol=60 * 2.0**-53)
    # The tanh form is 4.73e-4 away: the test above could not pass with it.
    assert np.abs(tanh - exact).max() == pytest.approx(4.73e-4, rel=1e-3)
    assert feedforward.activate(jnp.ones(1), "gelu")[0] == pytest.approx(0.841345, abs=5e-7)


def test_relu_passes_no_gradient_at_zero():
    ours = jax.grad(lambda x: feedforward.activate(x, "relu").sum())(jnp.zeros(1))
    x = torch.zeros(1, requires_grad=True)
    reference.activate(x, "relu").sum().backward()
    assert float(ours[0]) == float(x.grad[0]) == 0.0


def test_gelu_in_bfloat16_is_rounded_once():
    x = jnp.asarray(GRID, jnp.bfloat16)
    exact = jnp.asarray([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in to_numpy(x)])
    found = feedforward.activate(x, "gelu")
    assert found.dtype == jnp.bfloat16
    # Half an ulp of bfloat16; the cancellation of 1 + erf in float32 below that.
    np.testing.assert_allclose(to_numpy(found), exact, rtol=2.0**-8 * 1.01, atol=60 * 2.0**-24)
