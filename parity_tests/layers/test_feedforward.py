"""The feed-forward network and its activations."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.config import Activation, LayerConfig
from jax_transformer.layers import feedforward
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    to_numpy,
)
from parity_tests.inputs import B, D, F, T, normal
from torch_reference.layers import feedforward as reference

# Zero is where ReLU has a corner, and far out GELU is x or nothing.
GRID = np.concatenate([np.linspace(-4, 4, 801), [-60, -13, -6, 6, 13, 60]]).astype(np.float32)

ACTIVATIONS = get_args(Activation)
NETWORK = {"d_model": D, "num_heads": 2, "d_ff": F, "causal": True}

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
        for activation in ACTIVATIONS
    ),
    *(
        Case(
            name=f"{activation} gated network {'with' if bias else 'without'} biases",
            jax=feedforward.GatedFeedForward,
            torch=reference.GatedFeedForward,
            arguments=(D, F, 0.1, activation),
            options={"bias": bias},
            inputs={"x": normal(B, T, D)},
            place="ffn",
        )
        for activation in ACTIVATIONS
        for bias in ([False, True] if activation == "silu" else [False])
    ),
    *(
        Case(
            name=f"network of a configuration: {options}",
            jax=feedforward.make_feed_forward,
            torch=reference.make_feed_forward,
            arguments=(LayerConfig(**NETWORK, **options),),
            inputs={"x": normal(B, T, D)},
            place="ffn",
        )
        for options in (
            {"activation": "quick_gelu", "ffn_bias": False},
            {"activation": "gelu_tanh", "gated": True, "ffn_bias": True},
        )
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


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


FORMULAS = {
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: max(x, 0.0),
    "sigmoid": sigmoid,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_name_is_its_own_formula(activation):
    with jax.enable_x64(True):
        x = GRID.astype(np.float64)
        exact = np.array([FORMULAS[activation](value) for value in x])
        ours = to_numpy(feedforward.activate(jnp.asarray(x), activation))
        theirs = reference.activate(torch.from_numpy(x), activation).numpy()
    np.testing.assert_allclose(ours, exact, rtol=1e-13, atol=60 * 2.0**-53)
    np.testing.assert_allclose(theirs, exact, rtol=1e-13, atol=60 * 2.0**-53)


def test_the_two_gelus_are_told_apart():
    one = jnp.ones(1)
    assert feedforward.activate(one, "gelu")[0] == pytest.approx(0.841345, abs=5e-7)
    assert feedforward.activate(one, "gelu_tanh")[0] == pytest.approx(0.841192, abs=5e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_slope_are_of_the_activation_itself(activation):
    with jax.enable_x64(True):
        x = jnp.asarray(GRID, jnp.float64)
        value, slope = feedforward.value_and_slope(activation, x)
        np.testing.assert_allclose(value, feedforward.activate(x, activation), atol=1e-14)
        expected = jax.grad(lambda x: feedforward.activate(x, activation).sum())(x)
        np.testing.assert_allclose(slope, expected, atol=1e-14)


def test_the_slope_of_silu_is_the_lecture_s():
    with jax.enable_x64(True):
        x = jnp.asarray(GRID, jnp.float64)
        gate = jax.nn.sigmoid(x)
        expected = gate + x * gate * (1 - gate)
        found = jax.grad(lambda x: feedforward.activate(x, "silu").sum())(x)
    np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_is_the_activated_one(activation):
    # gate [1, -1], up [2, 3], down sums.
    ours = fresh(lambda: feedforward.GatedFeedForward(1, 2, 0.0, activation, rngs=nnx.Rngs(0)))
    ours.gate_proj.kernel[...] = jnp.asarray([[1.0, -1.0]])
    ours.up_proj.kernel[...] = jnp.asarray([[2.0, 3.0]])
    ours.down_proj.kernel[...] = jnp.ones((2, 1))
    expected = 2 * FORMULAS[activation](1.0) + 3 * FORMULAS[activation](-1.0)
    assert ours(jnp.ones((1, 1, 1)))[0, 0, 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("module", [feedforward, reference])
def test_a_gated_network_has_the_parameters_of_a_plain_one_of_four_times_the_width(module):
    # Llama 7B, 13B, 65B; and where 8D/3 is whole.
    widths = {4096: 11008, 5120: 13824, 8192: 22016, 96: 256}
    assert {width: module.gated_width(width) for width in widths} == widths
    assert module.gated_width(576, 1) == 1536
    assert module.gated_width(64, 8) == 176
    for width in (96, 4096):
        assert 3 * width * module.gated_width(width) >= 2 * width * 4 * width


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_the_derivative_of_a_gated_product_saves_gate_and_up_alone(activation):
    def product(gate: jax.Array, up: jax.Array) -> jax.Array:
        return feedforward.activate_gated(gate, up, activation)

    wide = jnp.zeros((4, F))
    _, pull = jax.vjp(product, wide, wide)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull)) == 2 * wide.size
