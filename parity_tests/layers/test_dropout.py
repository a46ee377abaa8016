"""Dropout: rate, scale, and masks that depend on the key alone and repeat nowhere."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.layers.dropout import Dropout, fold_keys
from jax_transformer.layers.stack import layer_key

SHAPE = (64, 32, 48)
SIZE = 64 * 32 * 48
KEY = jax.random.key(0)


def kept(key, rate=0.5, shape=SHAPE):
    """Which ones of a tensor of ones survive."""
    return np.asarray(Dropout(rate)(jnp.ones(shape), key)) != 0


def correlation(first, second):
    """In standard deviations of what independent masks give."""
    return np.corrcoef(first.ravel(), second.ravel())[0, 1] * first.size**0.5


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_without_a_key_nothing_changes(rate):
    x = jax.random.normal(KEY, (3, 4))
    np.testing.assert_array_equal(Dropout(rate)(x), x)


def test_at_rate_zero_nothing_changes():
    x = jax.random.normal(KEY, (3, 4))
    np.testing.assert_array_equal(Dropout(0.0)(x, KEY), x)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_an_element_is_dropped_with_the_probability_of_the_rate(rate):
    deviation = (rate * (1 - rate) / SIZE) ** 0.5
    for seed in range(3):
        dropped = 1 - kept(jax.random.key(seed), rate).mean()
        assert abs(dropped - rate) < 5 * deviation


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_survives_is_divided_by_the_rate_of_survival(rate, dtype):
    x = jax.random.normal(KEY, (1000,)).astype(dtype)
    y = Dropout(rate)(x, KEY)
    assert y.dtype == dtype
    wide, out = np.asarray(x, np.float64), np.asarray(y, np.float64)
    ulp = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out[out != 0], (wide / (1 - rate))[out != 0], rtol=2 * ulp)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_mean_over_keys_is_the_input(rate):
    keys = jax.random.split(KEY, 2000)
    mean = jax.vmap(lambda key: Dropout(rate)(jnp.ones(8), key))(keys).mean(axis=0)
    # Within five standard errors.
    np.testing.assert_allclose(mean, 1.0, atol=5 * (rate / (1 - rate) / 2000) ** 0.5)


def test_the_gradient_passes_where_the_value_does():
    x = jax.random.normal(KEY, (50, 20))
    y, pull = jax.vjp(lambda x: Dropout(0.3)(x, KEY), x)
    (gradient,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(gradient * x, y, rtol=1e-6)
    np.testing.assert_array_equal(gradient == 0, y == 0)


def test_the_same_key_gives_the_same_mask_compiled_or_not():
    drop = jax.jit(lambda key: Dropout(0.5)(jnp.ones(SHAPE), key) != 0)
    np.testing.assert_array_equal(drop(KEY), kept(KEY))
    np.testing.assert_array_equal(kept(KEY), kept(KEY))


def test_masks_of_different_seeds_steps_layers_and_places_are_independent():
    steps = [jax.random.fold_in(KEY, step) for step in range(2)]
    layers = [layer_key(step, layer) for step in steps for layer in range(2)]
    places = [place for layer in layers for place in fold_keys(layer, 3)]
    keys = [KEY, jax.random.key(1), *steps, *layers, *places]
    masks = [kept(key) for key in keys]
    for first, second in itertools.combinations(masks, 2):
        # 171 pairs: the largest of them is beyond 5 once in 10,000 suites.
        assert abs(correlation(first, second)) < 5


def test_elements_of_one_mask_are_independent_of_their_neighbours():
    mask = kept(KEY).astype(float)
    for axis, lag in itertools.product(range(3), (1, 2, 16)):
        length = SHAPE[axis]
        first = mask.take(range(length - lag), axis)
        second = mask.take(range(lag, length), axis)
        assert abs(correlation(first, second)) < 5
    # Nor does the rate differ by row, column or position.
    for axis in range(3):
        sums = mask.sum(axis=tuple(set(range(3)) - {axis}))
        count = SIZE // SHAPE[axis]
        chi_square = ((sums - count / 2) ** 2 / (count / 4)).sum()
        assert abs(chi_square - SHAPE[axis]) < 5 * (2 * SHAPE[axis]) ** 0.5


def test_places_without_a_key_have_none():
    assert fold_keys(None, 3) == [None] * 3
    assert layer_key(None, 0) is None
