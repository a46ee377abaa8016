"""Decoding from the cache gives the logits of the full forward pass, at every step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import ModelConfig
from jax_transformer.decoding.cache import KeyValueCache, grow_cache, start_cache
from parity_tests.harness import QUICK, make_pair, to_numpy
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


@functools.cache
def compiled(name):
    """The two halves of decoding: what is done once, and what is done for each chunk."""
    _, model = models(name)

    def start(source, mask, slots):
        return start_cache(model.decoder, model.encode(source, mask), slots)

    def step(caches, source_mask, tokens, positions, tgt_mask):
        output = model.decoder.step(tokens, caches, source_mask, tgt_mask, positions)
        return model.project(output), caches

    return (
        jax.jit(start, static_argnums=2, compiler_options=QUICK),
        jax.jit(step, compiler_options=QUICK),
    )


class Stepper:
    """Steps of the cached decoder over the last `rows` rows of the batch."""

    def __init__(self, name, rows, slots=T + 2):
        self.reference, _ = models(name)
        self.source, self.mask = SOURCE[-rows:], SOURCE_MASK[-rows:]
        self.slots = slots
        start, self.step = compiled(name)
        self.caches = start(jnp.asarray(self.source), jnp.asarray(self.mask), slots)

    def __call__(self, tokens, start, hidden=None, positions=None):
        """Logits of `tokens`, which follow `start` others in the cache."""
        index = start + np.arange(tokens.shape[1])
        mask = np.arange(self.slots) <= index[:, None]
        mask = np.broadcast_to(mask, (len(tokens), 1, *mask.shape))
        if hidden is not None:
            mask = mask & ~hidden[:, None, None, :]
        if positions is None:
            positions = np.broadcast_to(index, tokens.shape)
        logits, self.caches = self.step(
            self.caches,
            jnp.asarray(self.mask),
            jnp.asarray(tokens),
            jnp.asarray(positions, jnp.int32),
            jnp.asarray(mask),
        )
        return to_numpy(logits)

    def uncached(self, tokens):
        """PyTorch's logits of the whole prefix."""
        causal = np.tril(np.ones((1, 1, *[tokens.shape[1]] * 2), bool))
        arrays = (self.source, tokens, self.mask, causal)
        with torch.no_grad():
            return self.reference(*map(torch.from_numpy, arrays)).numpy()


# Padding ids among them: to the decoder they are tokens like others.
TOKENS = np.where(padding(T), TARGET, 0).astype(np.int32)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_uncached_ones_at_every_length(name, rows):
    stepper = Stepper(name, rows)
    for index in range(T):
        found = stepper(TOKENS[:rows, index : index + 1], index)
        expected = stepper.uncached(TOKENS[:rows, : index + 1])[:, -1:]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [(7,), (5, 2)], ids=str)
def test_tokens_in_one_call_in_chunks_and_one_by_one_are_the_same(chunks):
    whole, single = Stepper("post", 3), Stepper("post", 3)
    found, start = [], 0
    for length in chunks:
        found.append(whole(TOKENS[:3, start : start + length], start))
        start += length
    one_by_one = [single(TOKENS[:3, index : index + 1], index) for index in range(T)]
    expected = single.uncached(TOKENS[:3])
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(one_by_one, 1), expected, rtol=0, atol=TOLERANCE)
    for first, second in zip(whole.caches, single.caches, strict=True):
        assert first.self_attn.length == second.self_attn.length == T
        for one, other in zip(first.self_attn.read(), second.self_attn.read(), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_left_padded_prompts_continue_as_they_would_alone():
    # Row 1 has 5 tokens behind two slots of padding.
    batch, alone = Stepper("post", 3), Stepper("post", 3)
    hidden = np.zeros((3, batch.slots), bool)
    hidden[1, :2] = True
    shift = np.array([[0], [2], [0]])
    positions = np.maximum(np.arange(T) - shift, 0)
    found = batch(TOKENS[:3], 0, hidden, positions)[1, 2:]
    expected = alone(TOKENS[:3, 2:], 0)[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    following = np.full((3, 1), 5, np.int32)
    found = batch(following, T, hidden, T - shift)[1]
    expected = alone(following, T - 2)[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_what_is_cached_stays_bit_for_bit():
    stepper = Stepper("post", 3)
    stepper(TOKENS[:3, :2], 0)
    caches = [(cache.self_attn.read(), cache.cross_attn.read()) for cache in stepper.caches]
    before = jax.tree.map(np.array, caches)
    for index in range(2, T):
        stepper(TOKENS[:3, index : index + 1], index)
    for cache, (tokens, source) in zip(stepper.caches, before, strict=True):
        for held, expected in zip(cache.self_attn.read(), tokens, strict=True):
            np.testing.assert_array_equal(held[:, :2], expected[:, :2])
            assert np.abs(held[:, T - 1]).max() > 0
        for held, expected in zip(cache.cross_attn.read(), source, strict=True):
            np.testing.assert_array_equal(held, expected)


def test_a_grown_cache_goes_on_as_a_large_one():
    small, large = Stepper("pre", 3, slots=3), Stepper("pre", 3)
    for index in range(T):
        if index == 3:
            small.caches, small.slots = grow_cache(small.caches, large.slots), large.slots
        token = TOKENS[:3, index : index + 1]
        np.testing.assert_allclose(small(token, index), large(token, index), rtol=0, atol=TOLERANCE)


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
    with jax.enable_x64(False):
        _, model = make_pair(CONFIGS["post"])
    enc_output = jnp.asarray(normal(2, S, D))
    caches = start_cache(model.decoder, enc_output, 4)
    for layer, cache in zip(model.decoder.layers, caches, strict=True):
        expected = layer.cross_attn.project_key_value(enc_output, enc_output)
        for held, projected in zip(cache.cross_attn.read(), expected, strict=True):
            np.testing.assert_array_equal(held, projected)
        assert cache.self_attn.length == 0
        assert cache.cross_attn.length == S
