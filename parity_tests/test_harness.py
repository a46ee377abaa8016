"""The suite is itself tested: planted faults, each of which its criteria must catch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.layers.attention import MultiHeadAttention, dot_product_attention
from jax_transformer.layers.block import DecoderLayer, EncoderLayer, PreNormEncoderLayer
from jax_transformer.layers.feedforward import FeedForward
from jax_transformer.layers.linear import Embedding, Linear
from jax_transformer.layers.normalization import LayerNorm
from jax_transformer.layers.position import SinusoidalPositionalEncoding
from jax_transformer.training.loss import LossSum, cross_entropy
from parity_tests.harness import assert_same_function, check_float32, check_float64, run_torch
from parity_tests.layers import (
    test_attention,
    test_block,
    test_feedforward,
    test_linear,
    test_normalization,
    test_position,
)
from parity_tests.training import test_loss


class AnotherEpsilon(LayerNorm):
    def __init__(self, d_model):
        super().__init__(d_model, 1e-6)


class NoMeanGradient(LayerNorm):
    """Right forwards."""

    def __call__(self, x):
        mean = jax.lax.stop_gradient(x.mean(-1, keepdims=True))
        centred = x - mean
        inverse = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.epsilon)
        return centred * inverse * self.scale[...] + self.bias[...]


class Float32Norm(LayerNorm):
    def __call__(self, x):
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


class OnePassVariance(LayerNorm):
    """E[x^2] - E[x]^2: the same function, but it cancels in float32."""

    def __call__(self, x):
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
        return (x - mean) * jax.lax.rsqrt(variance + self.epsilon) * self.scale + self.bias[...]


class TanhGelu(FeedForward):
    def __call__(self, x):
        return self.linear2(jax.nn.gelu(self.linear1(x), approximate=True))


class NoBias(Linear):
    def __call__(self, x):
        return super().__call__(x) - self.bias[...]


class ShiftedIds(Embedding):
    def __call__(self, ids):
        return super().__call__(jnp.maximum(ids - 1, 0))


class ShiftedPositions(SinusoidalPositionalEncoding):
    def __call__(self, x, positions=None):
        return super().__call__(x, jnp.minimum(positions + 1, 4999))


class IgnoredPositions(SinusoidalPositionalEncoding):
    def __call__(self, x, positions=None):
        return super().__call__(x)


class HalvesOfHeads(MultiHeadAttention):
    """Head i takes every N-th column."""

    def split_heads(self, x, norm=None):
        return x.reshape(*x.shape[:2], self.head_dim, -1).swapaxes(2, 3)


class SwappedKeyAndValue(MultiHeadAttention):
    def project_key_value(self, key, value):
        return super().project_key_value(value, key)


class NoSecondResidual(EncoderLayer):
    def __call__(self, x, src_mask=None):
        attn_out, weights = self.self_attn(x, x, x, src_mask)
        x = self.norm1(x + attn_out)
        return self.norm2(self.ffn(x)), weights


class SwappedNorms(DecoderLayer):
    def __call__(self, *inputs):
        self.norm1, self.norm2 = self.norm2, self.norm1
        try:
            return super().__call__(*inputs)
        finally:
            self.norm1, self.norm2 = self.norm2, self.norm1


def unscaled_attention(query, key, value, mask):
    return dot_product_attention(query * query.shape[-1] ** 0.5, key, value, mask)


def uniform_over_nothing(query, key, value, mask):
    """A query without keys sees all of them."""
    return dot_product_attention(query, key, value, mask | ~mask.any(-1, keepdims=True))


def one_key_too_many(query, key, value, mask):
    return dot_product_attention(query, key, value, mask | jnp.roll(mask, 1, axis=-1))


def inverted_mask(query, key, value, mask):
    return dot_product_attention(query, key, value, ~mask)


def smoothing_over_others(logits, labels, *, label_smoothing, **options):
    """Spread over V - 1 classes."""
    classes = logits.shape[-1]
    smoothing = label_smoothing * classes / (classes - 1)
    return cross_entropy(logits, labels, label_smoothing=smoothing, **options)


def mean_over_all(logits, labels, **options):
    loss = cross_entropy(logits, labels, **options)
    return LossSum(loss.total, jnp.asarray(labels.size))


NORM, FEEDFORWARD, LINEAR = (
    test_normalization.CASES[0],
    test_feedforward.CASES[0],
    test_linear.CASES[0],
)
EMBEDDING, POSITION = test_linear.CASES[2], test_position.CASES[0]
ATTENTION, CAUSAL, HEADS = (test_attention.CASES[index] for index in (1, 2, 4))
ENCODER, DECODER = test_block.CASES[0], test_block.CASES[2]
SMOOTHED = test_loss.CASES[2]

DIFFERENT_FUNCTIONS = [
    (NORM, AnotherEpsilon),
    (NORM, NoMeanGradient),
    (NORM, Float32Norm),
    (FEEDFORWARD, TanhGelu),
    (LINEAR, NoBias),
    (EMBEDDING, ShiftedIds),
    (POSITION, ShiftedPositions),
    (POSITION, IgnoredPositions),
    (ATTENTION, unscaled_attention),
    (ATTENTION, uniform_over_nothing),
    (ATTENTION, inverted_mask),
    (CAUSAL, one_key_too_many),
    (HEADS, HalvesOfHeads),
    (HEADS, SwappedKeyAndValue),
    (ENCODER, PreNormEncoderLayer),
    (ENCODER, NoSecondResidual),
    (DECODER, SwappedNorms),
    (SMOOTHED, smoothing_over_others),
    (SMOOTHED, mean_over_all),
]


@pytest.mark.parametrize(
    ("case", "fault"), DIFFERENT_FUNCTIONS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_different_function_is_caught(case, fault):
    with pytest.raises(AssertionError):
        check_float64(dataclasses.replace(case, jax=fault), "op by op")


@pytest.mark.parametrize("fault", [OnePassVariance])
def test_a_less_accurate_form_of_the_same_function_is_caught(fault):
    # Of rows that lie far from zero; in float64 the cancellation leaves enough digits.
    rows = 100 + np.random.default_rng(0).standard_normal((4, 7, 16)).astype(np.float32)
    case = dataclasses.replace(NORM, inputs={"x": rows})
    check_float32(case, "op by op")
    with pytest.raises(AssertionError):
        check_float32(dataclasses.replace(case, jax=fault), "op by op")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": [np.nan, 1.0]}, {"a": [1.0, 1.0]}),
        ({"a": [np.nan, 1.0]}, {"a": [np.nan, 1.0]}),
        ({"a": [1e-100]}, {"a": [0.0]}),
        ({"a": [1.0 + 2e-12]}, {"a": [1.0]}),
        ({"a": [[1.0]]}, {"a": [1.0]}),
        ({}, {"a": [1.0]}),
        ({"a": [1.0], "b": [1.0]}, {"a": [1.0]}),
    ],
    ids=["NaN", "NaN in both", "not zero", "2e-12", "shape", "missing", "too many"],
)
def test_the_criterion_refuses(found, expected):
    found, expected = (
        {name: np.array(values) for name, values in tensors.items()}
        for tensors in (found, expected)
    )
    with pytest.raises(AssertionError):
        assert_same_function(found, expected)


def test_the_criterion_refuses_float32_in_place_of_float64():
    ones = {"a": np.ones(2)}
    with pytest.raises(AssertionError):
        assert_same_function({"a": np.ones(2, np.float32)}, ones)
    assert_same_function({"a": np.ones(2) + 1e-13}, ones)


def test_gradients_of_every_parameter_and_float_input_are_compared():
    names = run_torch(HEADS, torch.float64)
    parameters = [f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    inputs = ["input query", "input key", "input value"]
    assert set(names) == {"output 0", "output 1"} | {
        f"gradient of {name}" for name in (*parameters, *inputs)
    }
