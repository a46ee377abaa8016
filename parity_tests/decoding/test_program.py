"""The two compiled programs of generation: cached equals uncached, whatever the cache."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_transformer.config import PAD_ID
from jax_transformer.decoding import program
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.decoding.program import EMPTY, Structure
from jax_transformer.decoding.rolling import RollingCache
from jax_transformer.decoding.sampling import NO_TOKEN, Greedy, RepetitionPenalty, Sample
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import split
from parity_tests.harness import QUICK, fresh, to_numpy
from parity_tests.inputs import V
from parity_tests.models.architectures import CONFIGS

# Sums of other lengths in another order: a few ulp of logits of order 10.
TOLERANCE = 1e-12
NAMES = ("Llama", "Mistral", "Gemma 3", "BLOOM", "GPT-2", "sinusoidal", "T5's bias")
"""Mistral's window is 3: its cache rolls. Gemma 3 has layers with a window, whose caches roll, and
others, whose caches do not."""

LENGTHS = (2, 5, 7, 0)
"""Of the prompts; the last row only fills the batch."""
STEPS, SLOTS = 6, 24
WIDTH = 16
TEXT = np.random.default_rng(0).integers(0, V, (len(LENGTHS), 7 + STEPS)).astype(np.int32)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def parts(name, dtype="float64"):
    model = fresh(lambda: DecoderOnly(CONFIGS[name], rngs=nnx.Rngs(0)), jnp.dtype(dtype))
    graphdef, params, buffers = split(model)
    return Structure(graphdef), params, buffers


class Forced(Greedy):
    """Chooses nothing; keeps the logits of the program that is being traced."""

    def __call__(self, logits, seen, rows, positions):
        object.__setattr__(self, "logits", logits)
        return jnp.zeros(len(logits), jnp.int32)


FORCED = Forced()


@functools.cache
def programs(name):
    """Prefill and step that also give the logits, the step for tokens that are given."""
    structure, _, _ = parts(name)

    def prefill(params, buffers, *batch):
        state, _ = program.prefill.__wrapped__(
            structure, params, buffers, *batch, strategy=FORCED, slots=SLOTS, end_ids=()
        )
        return state, FORCED.logits

    def step(params, buffers, state, token):
        state = dataclasses.replace(state, token=token)
        state, _ = program.step.__wrapped__(
            structure, params, buffers, state, strategy=FORCED, end_ids=()
        )
        return state, FORCED.logits

    return tuple(jax.jit(each, compiler_options=QUICK) for each in (prefill, step))


@functools.cache
def whole(name):
    """The model without cache or padding."""
    structure, params, buffers = parts(name)
    run = jax.jit(lambda tokens: structure.merge(params, buffers)(tokens), compiler_options=QUICK)
    return lambda tokens: to_numpy(run(jnp.asarray(tokens)))


@functools.cache
def uncached(name):
    """The logits of each row."""
    return whole(name)(TEXT)


def prompts(rows):
    tokens = np.zeros((len(rows), WIDTH), np.int32)
    for place, row in enumerate(rows):
        tokens[place, WIDTH - LENGTHS[row] :] = TEXT[row, : LENGTHS[row]]
    return tokens, np.array([LENGTHS[row] for row in rows]), np.array(rows)


def cached(name, rows):
    """The states after prefill and each step, and the logits after each, `[B, 1 + STEPS, V]`."""
    _, params, buffers = parts(name)
    prefill, step = programs(name)
    state, logits = prefill(params, buffers, *map(np.int32, prompts(rows)))
    states, found = [state], [logits]
    for index in range(STEPS):
        token = np.array([TEXT[row, LENGTHS[row] + index] for row in rows])
        state, logits = step(params, buffers, state, token)
        states.append(state)
        found.append(logits)
    return states, to_numpy(jnp.stack(found, axis=1))


@pytest.mark.parametrize("rows", [(0,), (2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_the_logits_of_its_tokens_alone_at_every_position(name, rows):
    _, found = cached(name, rows)
    for place, row in enumerate(rows):
        if LENGTHS[row]:
            expected = uncached(name)[row, LENGTHS[row] - 1 :][: 1 + STEPS]
            np.testing.assert_allclose(found[place], expected, rtol=0, atol=TOLERANCE)


def test_the_caches_of_blocks_with_a_window_roll_and_the_others_do_not():
    full, rolling = (KeyValueCache, SLOTS), (RollingCache, 3)
    for name, expected, local_width in (
        ("Mistral", [rolling], None),
        ("Gemma 3", [(RollingCache, 2), full, (RollingCache, 2)], 2),
        ("Llama", [full] * 2, None),
    ):
        state = cached(name, (0, 1, 2, 3))[0][0]
        assert [(type(cache), cache.size) for cache in state.caches] == expected
        width = max(size for _, size in expected)
        assert state.key_positions.shape == (4, width)
        local = state.local_key_positions
        assert (None if local is None else local.shape) == (
            None if local_width is None else (4, local_width)
        )


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_what_is_cached_stays_bit_for_bit_until_it_is_overwritten(name):
    # Keys are turned by their positions once, when they are written.
    states, _ = cached(name, (0, 1, 2, 3))
    size = states[0].caches[0].size
    for before, after in itertools.pairwise(states):
        written = int(before.caches[0].next_slot)
        kept = np.arange(size) != written
        for old, new in zip(before.caches, after.caches, strict=True):
            for held, expected in ((new.key, old.key), (new.value, old.value)):
                np.testing.assert_array_equal(held[:, :, kept], expected[:, :, kept])
                assert (held[:3, :, written] != expected[:3, :, written]).any()


def test_a_key_is_turned_by_its_own_position_not_by_that_of_its_step():
    # That of the sixth token, written by a step, is that of a prefill of seven.
    stepped, _ = cached("Llama", (1,))
    whole, _ = cached("Llama", (2,))
    _, params, buffers = parts("Llama")
    prefill, step = programs("Llama")
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, WIDTH - 5 :] = TEXT[2, :5]
    state, _ = prefill(params, buffers, tokens, np.int32([5]), np.int32([0]))
    state, _ = step(params, buffers, state, TEXT[2, 5:6])
    for one, other in zip(state.caches, whole[0].caches, strict=True):
        # Slot 16 of the one, the slot before the last of the prompt of the other.
        np.testing.assert_allclose(
            one.key[:, WIDTH], other.key[:, WIDTH - 2], rtol=0, atol=TOLERANCE
        )
    assert int(state.key_positions[0, WIDTH]) == 5
    assert int(stepped[1].key_positions[0, WIDTH]) == 5


def test_slots_hold_the_positions_of_their_tokens():
    states, _ = cached("Llama", (0, 1, 2, 3))
    expected = np.full((4, SLOTS), EMPTY)
    for row, length in enumerate(LENGTHS):
        expected[row, WIDTH - length : WIDTH] = np.arange(length)
        expected[row, WIDTH : WIDTH + STEPS] = max(length, 1) + np.arange(STEPS)
    np.testing.assert_array_equal(states[-1].key_positions[:3], expected[:3])
    rolling, _ = cached("Mistral", (0, 1, 2, 3))
    for row in range(3):
        last = LENGTHS[row] + STEPS - 1
        held = sorted(to_numpy(rolling[-1].key_positions[row]).tolist())
        assert held == [last - 2, last - 1, last]


# Choosing.


quick_prefill = jax.jit(
    program.prefill.__wrapped__,
    static_argnames=("structure", "strategy", "slots", "end_ids"),
    compiler_options=QUICK,
)
quick_step = jax.jit(
    program.step.__wrapped__,
    static_argnames=("structure", "strategy", "end_ids"),
    compiler_options=QUICK,
)


@functools.cache
def generate(name, strategy, end_ids=(), steps=STEPS, rows=(0, 1, 2, 3), dtype="float64"):
    """The tokens of each row, and which have ended, after prefill and each step."""
    model = parts(name, dtype)
    options = {"strategy": strategy, "end_ids": end_ids}
    batch = [np.int32(each) for each in prompts(rows)]
    state, chosen = quick_prefill(*model, *batch, slots=SLOTS, **options)
    results = [jax.device_get(chosen)]
    for _ in range(steps):
        state, chosen = quick_step(*model, state, **options)
        results.append(jax.device_get(chosen))
    return np.stack([each.token for each in results], 1), np.stack(
        [each.ended for each in results], 1
    )


def test_a_row_that_has_ended_stays_ended_and_gets_padding():
    endless, _ = generate("Llama", Greedy())
    end = int(endless[1, 2])
    tokens, ended = generate("Llama", Greedy(), (end, V + 1))
    for row in range(3):
        found = np.flatnonzero(endless[row] == end)
        stop = found[0] if len(found) else STEPS
        np.testing.assert_array_equal(tokens[row, : stop + 1], endless[row, : stop + 1])
        np.testing.assert_array_equal(tokens[row, stop + 1 :], PAD_ID)
        np.testing.assert_array_equal(ended[row], np.arange(1 + STEPS) >= stop)
    assert not ended[:3].all()
    # The row that fills the batch never begins.
    np.testing.assert_array_equal(tokens[3], PAD_ID)
    assert ended[3].all()


def test_the_penalty_sees_prompt_and_chosen_tokens_but_no_padding():
    strategy = Greedy(filters=(RepetitionPenalty(1e9),))
    tokens, _ = generate("Llama", strategy, steps=3)
    for row, length in enumerate(LENGTHS[:3]):
        text = TEXT.copy()
        for place, token in enumerate(tokens[row], start=length):
            logits = whole("Llama")(text)[row, place - 1]
            seen = np.unique(text[row, :place])
            logits[seen] = np.where(logits[seen] < 0, logits[seen] * 1e9, logits[seen] / 1e9)
            assert token == logits.argmax()
            text[row, place] = token


def test_a_model_that_gives_nan_chooses_nothing():
    structure, params, buffers = parts("Llama")
    spoilt = jax.tree.map(lambda leaf: leaf, params)
    spoilt["norm"]["scale"] = jnp.full_like(params["norm"]["scale"], jnp.nan)
    batch = [np.int32(each) for each in prompts((0, 1, 2, 3))]
    options = {"strategy": Greedy(), "end_ids": ()}
    _, chosen = quick_prefill(structure, spoilt, buffers, *batch, slots=SLOTS, **options)
    np.testing.assert_array_equal(chosen.token, [NO_TOKEN] * 3 + [PAD_ID])


def test_draws_do_not_depend_on_the_batch():
    batch, _ = generate("Llama", Sample(seed=1))
    for row in range(3):
        alone, _ = generate("Llama", Sample(seed=1), rows=(row,))
        np.testing.assert_array_equal(alone[0], batch[row])
    other, _ = generate("Llama", Sample(seed=2))
    assert (batch[:3] != other[:3]).any()


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=str)
def test_caches_are_overwritten_in_place(name, rows):
    with jax.enable_x64(False):
        model = parts(name, "float32")
        options = {"strategy": Greedy(), "end_ids": ()}
        batch = [np.int32(each) for each in prompts(rows)]
        state, _ = program.prefill(*model, *batch, slots=SLOTS, **options)
        leaves, tree = jax.tree.flatten(state)

        def step(params, buffers, leaves):
            state = jax.tree.unflatten(tree, leaves)
            state, _ = program.step.__wrapped__(model[0], params, buffers, state, **options)
            return jax.tree.leaves(state)

        compiled = jax.jit(step, donate_argnums=2).lower(*model[1:], leaves).compile()
        shape = ",".join(map(str, state.caches[0].key.shape))
        assert f"f32[{shape}]" in compiled.as_text()
        copies = [
            line
            for line in compiled.as_text().splitlines()
            if " copy(" in line and f"= f32[{shape}]" in line
        ]
        assert copies == []
        program.step(*model, state, **options)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.caches))


def test_transposed_kernels_give_the_same_logits():
    structure, params, buffers = program.transposed(*parts("Llama"))
    graphdef = parts("Llama")[0].graphdef
    assert structure != parts("Llama")[0]
    found = structure.merge(params, buffers)(jnp.asarray(TEXT))
    expected = nnx.merge(graphdef, *parts("Llama")[1:])(jnp.asarray(TEXT))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_structures_of_equal_models_are_equal():
    again = Structure(split(fresh(lambda: DecoderOnly(CONFIGS["Llama"], rngs=nnx.Rngs(0))))[0])
    assert again == parts("Llama")[0]
    assert hash(again) == hash(parts("Llama")[0])
    assert again != parts("Mistral")[0]
    assert again != again.graphdef


def test_prompts_of_one_bucket_and_all_tokens_compile_once_each():
    model = parts("Llama")
    options = {"strategy": Greedy(), "end_ids": ()}
    chex.clear_trace_counter()
    prefill, step = (
        jax.jit(chex.assert_max_traces(each.__wrapped__, n=1), static_argnames=statics)
        for each, statics in (
            (program.prefill, ("structure", "strategy", "slots", "end_ids")),
            (program.step, ("structure", "strategy", "end_ids")),
        )
    )
    for row in (1, 2, 0):
        batch = [np.int32(each) for each in prompts((row,))]
        state, _ = prefill(*model, *batch, slots=SLOTS, **options)
        for _ in range(3):
            state, _ = step(*model, state, **options)
