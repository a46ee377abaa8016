"""Decoding from the cache gives the logits of the full forward pass, at every step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import ModelConfig
from jax_transformer.decoding.cache import KeyValueCache, grow_cache, start_cache
from parity_tests.harness import make_pair, to_numpy
from parity_tests.inputs import SOURCE, SOURCE_MASK, TARGET, D, F, N, S, T, V, normal, padding

# Sums of other lengths in another order: a few ulp of logits of order 10.
TOLERANCE = 1e-12


def config(**options):
    return ModelConfig(
        src_vocab_size=V,
        tgt_vocab_size=V,
        d_model=D,
        num_heads=N,
        d_ff=F,
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_len=20,
        **options,
    )


CONFIGS = {
    "post": config(position_encoding="learned"),
    "pre": config(norm_placement="pre", tied_tables="all"),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def models(name):
    return make_pair(CONFIGS[name], jnp.float64)


class Stepper:
    """Steps of the cached decoder over the first `rows` rows of the batch, compiled."""

    def __init__(self, name, rows, slots):
        self.reference, self.model = models(name)
        self.rows, self.slots = rows, slots
        self.mask = jnp.asarray(SOURCE_MASK[:rows])
        enc_output = self.model.encode(jnp.asarray(SOURCE[:rows]), self.mask)
        self.caches = start_cache(self.model.decoder, enc_output, slots)

        @jax.jit
        def step(caches, tokens, positions, tgt_mask):
            output = self.model.decoder.step(tokens, caches, self.mask, tgt_mask, positions)
            return self.model.project(output), caches

        self.step = step

    def __call__(self, tokens, start, hidden=None, positions=None):
        """Logits of `tokens`, which follow `start` others in the cache."""
        length = tokens.shape[1]
        index = start + np.arange(length)
        mask = np.arange(self.slots) <= index[:, None]
        mask = np.broadcast_to(mask, (self.rows, 1, *mask.shape))
        if hidden is not None:
            mask = mask & ~hidden[:, None, None, :]
        if positions is None:
            positions = np.broadcast_to(index, tokens.shape)
        logits, self.caches = self.step(
            self.caches, jnp.asarray(tokens), jnp.asarray(positions, jnp.int32), jnp.asarray(mask)
        )
        return to_numpy(logits)

    def uncached(self, tokens):
        """PyTorch's logits of the whole prefix."""
        causal = np.tril(np.ones((1, 1, *[tokens.shape[1]] * 2), bool))
        arrays = (SOURCE[: self.rows], tokens, SOURCE_MASK[: self.rows], causal)
        with torch.no_grad():
            return self.reference(*map(torch.from_numpy, arrays)).numpy()


# Padding ids among them: to the decoder they are tokens like others.
TOKENS = np.where(padding(T), TARGET, 0).astype(np.int32)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_uncached_ones_at_every_length(name, rows):
    stepper = Stepper(name, rows, T)
    for index in range(T):
        found = stepper(TOKENS[:rows, index : index + 1], index)
        expected = stepper.uncached(TOKENS[:rows, : index + 1])[:, -1:]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [(7,), (5, 2), (1, 6)], ids=str)
def test_tokens_in_one_call_in_chunks_and_one_by_one_are_the_same(chunks):
    whole, single = Stepper("post", 3, T + 2), Stepper("post", 3, T + 2)
    found = []
    for length in chunks:
        start = sum(part.shape[1] for part in found)
        found.append(whole(TOKENS[:3, start : start + length], start))
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found, single.uncached(TOKENS[:3]), rtol=0, atol=TOLERANCE)
    one_by_one = [single(TOKENS[:3, i : i + 1], i) for i in range(T)]
    np.testing.assert_allclose(found, np.concatenate(one_by_one, 1), rtol=0, atol=TOLERANCE)
    for first, second in zip(whole.caches, single.caches, strict=True):
        assert first.self_attn.length == second.self_attn.length == T
        for one, other in zip(first.self_attn.read(), second.self_attn.read(), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_left_padded_prompts_continue_as_they_would_alone():
    # Rows of 7 and 5 tokens: the second begins with two slots of padding.
    hidden = np.zeros((2, T + 2), bool)
    hidden[1, :2] = True
    tokens = np.concatenate([TOKENS[:1], TOKENS[2:3]])
    positions = np.stack([np.arange(T), np.maximum(np.arange(T) - 2, 0)])
    batch, alone = Stepper("post", 2, T + 2), Stepper("post", 2, T + 2)
    found = batch(tokens, 0, hidden, positions)[1]
    expected = alone(np.repeat(tokens[1:, 2:], 2, axis=0), 0)[1]
    np.testing.assert_allclose(found[2:], expected, rtol=0, atol=TOLERANCE)
    following = np.full((2, 1), 5, np.int32)
    found = batch(following, T, hidden, np.array([[T], [T - 2]]))[1]
    expected = alone(following, T - 2)[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_what_is_cached_stays_bit_for_bit():
    stepper = Stepper("post", 3, T)
    stepper(TOKENS[:3, :2], 0)
    before = jax.tree.map(
        np.array, [(c.self_attn.read(), c.cross_attn.read()) for c in stepper.caches]
    )
    for index in range(2, T):
        stepper(TOKENS[:3, index : index + 1], index)
    for cache, (tokens, source) in zip(stepper.caches, before, strict=True):
        for held, expected in zip(cache.self_attn.read(), tokens, strict=True):
            np.testing.assert_array_equal(held[:, :2], expected[:, :2])
            assert np.abs(held[:, T - 1]).max() > 0
        for held, expected in zip(cache.cross_attn.read(), source, strict=True):
            np.testing.assert_array_equal(held, expected)


def test_a_grown_cache_goes_on_as_a_large_one():
    small, large = Stepper("pre", 3, 3), Stepper("pre", 3, T)
    for index in range(3):
        token = TOKENS[:3, index : index + 1]
        np.testing.assert_allclose(small(token, index), large(token, index), rtol=0, atol=TOLERANCE)
    small.caches, small.slots = grow_cache(small.caches, T), T
    for index in range(3, T):
        token = TOKENS[:3, index : index + 1]
        np.testing.assert_array_equal(small(token, index), large(token, index))


def test_keys_and_values_go_to_the_next_free_slots():
    key, value = (jnp.asarray(normal(2, 3, 1, 2, seed=seed)) for seed in range(2))
    cache = KeyValueCache.empty(key, 5)
    assert cache.length == 0
    cache.update(key[:, :2], value[:, :2])
    keys, values = cache.update(key[:, 2:], value[:, 2:])
    assert cache.length == 3
    assert keys.shape == values.shape == (2, 5, 1, 2)
    assert keys.dtype == key.dtype
    np.testing.assert_array_equal(keys[:, :3], key)
    np.testing.assert_array_equal(values[:, :3], value)
    np.testing.assert_array_equal(keys[:, 3:], 0.0)
    np.testing.assert_array_equal(cache.read(), (keys, values))
    grown = cache.grow(8)
    assert grown.length == 3
    for larger, smaller in zip(grown.read(), (keys, values), strict=True):
        np.testing.assert_array_equal(larger[:, :5], smaller)
        np.testing.assert_array_equal(larger[:, 5:], 0.0)


def test_the_encoders_output_is_projected_once():
    _, model = models("post")
    enc_output = jnp.asarray(normal(2, S, D), jnp.float64)
    caches = start_cache(model.decoder, enc_output, 4)
    for layer, cache in zip(model.decoder.layers, caches, strict=True):
        expected = layer.cross_attn.project_key_value(enc_output, enc_output)
        for held, projected in zip(cache.cross_attn.read(), expected, strict=True):
            np.testing.assert_array_equal(held, projected)
        assert cache.self_attn.length == 0
        assert cache.cross_attn.length == S
