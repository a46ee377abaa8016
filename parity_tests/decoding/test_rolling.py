"""Which token is in which slot of a cache that keeps the last few."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.decoding.rolling import RollingCache, roll_slots
from parity_tests.inputs import normal

W = 4


def tokens(count, batch=2):
    """Keys and values of so many tokens, 3 heads of width 5."""
    return (jnp.asarray(normal(batch, count, 3, 5, seed=seed)) for seed in range(2))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("start", [1, 3, 4, 5, 9])
def test_token_n_is_in_slot_n_modulo_the_size_whether_read_at_once_or_in_steps(start, batch):
    key, value = tokens(12, batch)
    full = KeyValueCache.empty(key, start)
    full.update(key[:, :start], value[:, :start])
    cache = RollingCache.last_of(full, W)
    for length in range(start, 13):
        assert cache.size == W
        assert cache.length == length
        for held, all_tokens in zip(cache.read(), (key, value), strict=True):
            for token in range(max(length - W, 0), length):
                np.testing.assert_array_equal(held[:, token % W], all_tokens[:, token])
        if length < 12:
            found = cache.update(*(each[:, length : length + 1] for each in (key, value)))
            np.testing.assert_array_equal(found, cache.read())


def test_several_tokens_at_once_and_growth_are_refused():
    key, value = tokens(2)
    cache = RollingCache.empty(key, W)
    with pytest.raises(TypeError, match="2 tokens at once: a rolling cache takes one at a time"):
        cache.update(key, value)
    with pytest.raises(TypeError, match="4 slots does not grow to 8"):
        cache.grow(8)


def test_rolled_slots_as_a_table():
    rows = np.arange(1, 7)[None]
    for size, expected in (
        (2, [5, 6]),
        (4, [5, 6, 3, 4]),
        (5, [6, 2, 3, 4, 5]),
        (6, [1, 2, 3, 4, 5, 6]),
        (8, [1, 2, 3, 4, 5, 6, -1, -1]),
    ):
        found = roll_slots(jnp.asarray(rows), size, axis=1, fill=-1)
        np.testing.assert_array_equal(found, [expected])


@pytest.mark.parametrize("kind", [KeyValueCache, RollingCache])
def test_squeezed_and_back(kind):
    for batch, ndim in ((1, 3), (2, 4)):
        key, value = tokens(1, batch)
        cache = kind.empty(key, W)
        cache.update(key, value)
        squeezed = cache.squeezed()
        assert type(squeezed) is kind
        assert squeezed.key.ndim == squeezed.value.ndim == ndim
        assert squeezed.size == W
        again = squeezed.unsqueezed()
        np.testing.assert_array_equal(again.key, cache.key)
        np.testing.assert_array_equal(again.value, cache.value)
        assert again.length == squeezed.length == 1
