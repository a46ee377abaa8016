"""The causal language model: every architecture and option, packing, padding and caches."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.config import DecoderOnlyConfig, from_dict
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.errors import InputError
from jax_transformer.layers.stack import stack_layers, stack_template, unstack_layers
from jax_transformer.models import decoder_only
from jax_transformer.models.parameters import count_parameters, flatten, split
from parity_tests.harness import (
    QUICK,
    Case,
    check_float32,
    check_float64,
    declare,
    fresh,
    make_skeleton,
    run_torch,
    to_numpy,
)
from parity_tests.harness.cases import make_reference
from parity_tests.harness.weights import carry
from parity_tests.inputs import TARGET, TARGET_POSITIONS, B, T, V, padding
from parity_tests.models.architectures import (
    CONFIGS,
    GATED,
    GEMMA_3,
    OFFSET,
    configs,
    decoder,
    layer_of,
)
from torch_reference.models import decoder_only as reference

MASK = padding(T)[:, None, None, :]
SEGMENTS = np.tile(np.array([3, 3, 3, 7, 7, 1, 1], np.int32), (B, 1))


def case_of(name, config, segments=None):
    # Restarting positions are the model's own, others are given.
    positions = TARGET_POSITIONS if segments is None else None
    inputs = {"tokens": TARGET, "mask": MASK, "positions": positions, "segments": segments}
    return Case(
        name=name,
        jax=decoder_only.DecoderOnly,
        torch=reference.DecoderOnly,
        arguments=(config,),
        inputs=inputs,
        place="",
    )


CASES = {name: case_of(name, config) for name, config in CONFIGS.items()}
PACKED = [case_of(f"{name}, packed", CONFIGS[name], SEGMENTS) for name in ("Llama", "BLOOM")]
declare(
    *CASES.values(),
    *PACKED,
    Case(
        name="positions of segments",
        jax=decoder_only.segment_positions,
        torch=reference.segment_positions,
        inputs={"segments": SEGMENTS},
    ),
)


@pytest.mark.parametrize("case", [*CASES.values(), *PACKED], ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_jax_is_as_accurate_as_pytorch(name):
    check_float32(CASES[name], "quick")


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_the_weights_give_logits_of_order_1_to_10(case):
    assert 1 < run_torch(case, torch.float64)["output 0"].std() < 10


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_both_frameworks_have_the_same_number_of_parameters(case):
    theirs = case.torch(*case.arguments)
    assert count_parameters(make_skeleton(case)) == sum(p.numel() for p in theirs.parameters())


def test_positions_restart_in_each_segment():
    segments = np.array([[5, 5, 5, 6, 6, 0], [0, 0, 1, 1, 0, 0]], np.int32)
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 0, 1]]
    np.testing.assert_array_equal(decoder_only.segment_positions(jnp.asarray(segments)), expected)
    np.testing.assert_array_equal(reference.segment_positions(torch.from_numpy(segments)), expected)


def make_runs(name):
    """Both models of an architecture, as functions of arrays that give NumPy logits in float64."""
    case = CASES[name]
    theirs = make_reference(case, 0, torch.float32).double()
    with jax.enable_x64(True):
        ours = carry(theirs, make_skeleton(case), "", jnp.float64)
        compiled = jax.jit(lambda *inputs: ours(*inputs), compiler_options=QUICK)

    def run_ours(*inputs):
        with jax.enable_x64(True):
            return to_numpy(compiled(*inputs))

    def run_theirs(*inputs):
        with torch.no_grad():
            given = [None if array is None else torch.from_numpy(array) for array in inputs]
            return theirs(*given).numpy()

    return ours, run_ours, run_theirs


# One of each kind of positions.
KINDS = [
    "GPT-2",
    "Llama",
    "Mistral",
    "Gemma 3",
    "BLOOM",
    "BLOOM of 6 heads",
    "T5's bias",
    "sinusoidal",
]


@pytest.mark.parametrize("name", KINDS)
def test_packed_documents_give_the_logits_of_each_alone(name):
    first, second = TARGET[:1, :4], TARGET[:1, 4:]
    packed = np.concatenate([first, second], axis=1)
    segments = np.array([[8, 8, 8, 8, 9, 9, 9]], np.int32)
    other = np.concatenate([(first + 1) % V, second], axis=1).astype(np.int32)
    for run in make_runs(name)[1:]:
        found = run(packed, None, None, segments)
        np.testing.assert_allclose(found[:, :4], run(first), rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[:, 4:], run(second), rtol=0, atol=1e-12)
        # Not a bit of the one document is in the other.
        np.testing.assert_array_equal(found[:, 4:], run(other, None, None, segments)[:, 4:])
        assert not np.allclose(found[:, 4:], run(packed)[:, 4:])


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_give_the_logits_of_their_tokens_alone(name):
    positions = np.maximum(np.cumsum(padding(T), 1) - 1, 0).astype(np.int32)
    for run in make_runs(name)[1:]:
        found = run(TARGET, MASK, positions)
        for row in range(3):
            real = MASK[row, 0, 0]
            alone = run(TARGET[row : row + 1, real])
            np.testing.assert_allclose(found[row, real], alone[0], rtol=0, atol=1e-12)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("name", KINDS)
def test_no_logit_depends_on_a_later_token_even_under_a_mask_that_allows_it(name):
    later = np.where(np.arange(T) < 4, TARGET, (TARGET + 1) % V).astype(np.int32)
    allowed = np.ones((1, 1, T, T), bool)
    for run in make_runs(name)[1:]:
        before, after = run(TARGET, allowed), run(later, allowed)
        np.testing.assert_array_equal(before[:, :4], after[:, :4])
        assert not np.allclose(before[:, 4:], after[:, 4:])


def test_a_window_of_three_hides_the_fourth_last_token():
    changed = TARGET.copy()
    changed[:, 2] = (changed[:, 2] + 1) % V
    for run in make_runs("Mistral")[1:]:
        same = np.isclose(run(TARGET), run(changed), rtol=0, atol=0).all(axis=-1)
        np.testing.assert_array_equal(same, [[True, True, False, False, False, True, True]] * B)


PREFILL, SLOTS = 3, 9


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_steps_give_the_logits_of_the_whole_at_every_position(name):
    # The third row is padded on the left, by two; two slots stay free.
    rows, real = TARGET[[0, 2]], padding(T)[[0, 2]]
    positions = np.maximum(np.cumsum(real, 1) - 1, 0).astype(np.int32)
    model, run, _ = make_runs(name)
    expected = run(rows, real[:, None, None], positions)
    config = model.config
    window = config.layer.window or SLOTS
    local_window = config.local_layer.window if config.local_layers else None
    slots = np.arange(SLOTS)
    key_real = np.pad(real, ((0, 0), (0, SLOTS - T)))
    key_positions = np.pad(positions, ((0, 0), (0, SLOTS - T)))

    def step(tokens, caches, masks, positions, key_positions):
        hidden = model.step(tokens, caches, masks[0], positions, key_positions, *masks[1:])
        return model.project(hidden), caches

    found = []
    with jax.enable_x64(True):
        compiled = jax.jit(step, compiler_options=QUICK)
        layer = config.layer
        like = jnp.zeros((2, 1, layer.kv_heads, layer.head_width), jnp.float64)
        caches = [KeyValueCache.empty(like, SLOTS) for _ in range(config.num_layers)]
        borders = [0, *range(PREFILL, T + 1)]
        for start, end in itertools.pairwise(borders):
            index = np.arange(start, end)[:, None]
            masks = [
                ((slots <= index) & (slots > index - w))[None, None] & key_real[:, None, None]
                for w in (window, local_window)
                if w is not None
            ]
            now = slice(start, end)
            logits, caches = compiled(rows[:, now], caches, masks, positions[:, now], key_positions)
            found.append(to_numpy(logits))
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=1e-12)


def test_a_step_without_the_positions_of_the_keys_is_refused_where_they_matter():
    model = fresh(lambda: decoder_only.DecoderOnly(CONFIGS["BLOOM"], rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="key_positions"):
        model.step(jnp.asarray(TARGET[:, :1]), [], None, jnp.asarray(TARGET_POSITIONS[:, :1]))


@pytest.mark.parametrize("name", ["Llama", "BLOOM"])
def test_listed_and_stacked_layers_agree_in_logits_and_gradients(name):
    config = dataclasses.replace(CONFIGS[name], num_layers=3)
    config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, dropout=0.2))

    def build():
        return decoder_only.DecoderOnly(config, rngs=nnx.Rngs(0))

    with jax.enable_x64(True):
        graphdef, params, buffers = split(fresh(build, jnp.float64))
        stacked_graphdef = split(stack_template(nnx.eval_shape(build)))[0]
        inputs = [jnp.asarray(array) for array in (TARGET, MASK, TARGET_POSITIONS)]

        def run(graphdef, params):
            def loss(params):
                model = nnx.merge(graphdef, params, buffers)
                logits = model(*inputs, dropout_key=jax.random.key(1))
                return jnp.square(logits).mean(), logits

            (_, logits), gradient = jax.jit(
                jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK
            )(params)
            return logits, gradient

        logits, gradient = run(graphdef, params)
        stacked_logits, stacked = run(stacked_graphdef, stack_layers(params))
        stacked = flatten(unstack_layers(stacked, params))
    np.testing.assert_allclose(logits, stacked_logits, rtol=0, atol=1e-12)
    for path, leaf in flatten(gradient).items():
        scale = np.abs(flatten(gradient)[path.replace("k_proj.bias", "k_proj.kernel")]).max()
        np.testing.assert_allclose(stacked[path], leaf, rtol=0, atol=1e-11 * scale, err_msg=path)


def test_layers_with_windows_of_their_own_cannot_be_stacked():
    model = nnx.eval_shape(lambda: decoder_only.DecoderOnly(CONFIGS["Gemma 3"], rngs=nnx.Rngs(0)))
    with pytest.raises(InputError, match="different kinds cannot be stacked"):
        stack_template(model)


def test_a_step_without_the_mask_of_the_local_layers_is_refused():
    model = fresh(lambda: decoder_only.DecoderOnly(CONFIGS["Gemma 3"], rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="local_mask"):
        model.step(jnp.asarray(TARGET[:, :1]), [], None, jnp.asarray(TARGET_POSITIONS[:, :1]))


def test_only_the_local_layers_have_the_window():
    # One hides all but the last two tokens, the other none: told apart by a changed first token.
    changed = TARGET.copy()
    changed[:, 0] = (changed[:, 0] + 1) % V
    whole, one = CONFIGS["Gemma 3"], {"num_layers": 1, "local_layers": (0,)}
    for config, reach in ((dataclasses.replace(whole, **one), 2), (whole, T)):
        model = fresh(lambda config=config: decoder_only.DecoderOnly(config, rngs=nnx.Rngs(0)))
        before, after = model(jnp.asarray(TARGET)), model(jnp.asarray(changed))
        same = np.isclose(before, after, rtol=0, atol=0).all(axis=-1)
        np.testing.assert_array_equal(same, [[index >= reach for index in range(T)]] * B)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_layers": ()}, "both or neither"),
        ({"local_layer": None}, "both or neither"),
        ({"local_layers": (0, 3)}, "indices of the 3 layers"),
        ({"local_layers": (2, 0)}, "ascending"),
        ({"local_layers": (0, 0)}, "different"),
        ({"local_layers": [0, 2]}, "must be a tuple"),
        (
            {"local_layer": layer_of({**GATED, **OFFSET, **GEMMA_3, "d_ff": 3})},
            "local_layer.d_ff=3",
        ),
        (
            {"local_layer": layer_of({**GATED, **OFFSET, **GEMMA_3, "rotary": None})},
            "rotary positions need both",
        ),
    ],
)
def test_local_layers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIGS["Gemma 3"], **changes)


def test_a_configuration_with_local_layers_is_the_same_after_json():
    config = CONFIGS["Gemma 3"]
    values = json.loads(json.dumps(config.to_dict()))
    assert from_dict(DecoderOnlyConfig, values, place="config") == config
    with pytest.raises(InputError, match="local_layers=3: must be a list"):
        from_dict(DecoderOnlyConfig, values | {"local_layers": 3}, place="config")
    with pytest.raises(InputError, match="must be a whole number"):
        from_dict(DecoderOnlyConfig, values | {"local_layers": ["0"]}, place="config")


def test_a_sequence_longer_than_a_learned_table_is_refused():
    config = decoder(position="learned")
    config = dataclasses.replace(config, max_len=T - 1)
    ours = fresh(lambda: decoder_only.DecoderOnly(config, rngs=nnx.Rngs(0)))
    theirs = reference.DecoderOnly(config)
    with pytest.raises(InputError, match="7 tokens is longer than the position table of 6"):
        ours(jnp.asarray(TARGET))
    with pytest.raises(InputError, match="7 tokens is longer than the position table of 6"):
        theirs(torch.from_numpy(TARGET))


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(configs(), st.booleans())
def test_any_combination_of_options_is_the_same_function(config, packed):
    check_float64(case_of("drawn", config, SEGMENTS if packed else None), "quick")
