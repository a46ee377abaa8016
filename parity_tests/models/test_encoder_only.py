"""The bidirectional encoder: every kind of positions, every part there or not, padding, packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.config import EncoderOnlyConfig, RotaryConfig
from jax_transformer.layers.stack import stack_layers, stack_template
from jax_transformer.models import encoder_only
from jax_transformer.models.parameters import count_parameters, split
from parity_tests.harness import (
    QUICK,
    Case,
    carry,
    check_float32,
    check_float64,
    declare,
    fresh,
    make_skeleton,
    run_torch,
    to_numpy,
)
from parity_tests.harness.cases import make_reference
from parity_tests.inputs import MAX_LEN, SOURCE, SOURCE_POSITIONS, B, S, V, padding
from parity_tests.models.architectures import GATED, ROTARY, layer_of
from torch_reference.models import encoder_only as reference

TYPES = np.random.default_rng(5).integers(0, 2, (B, S)).astype(np.int32)
MASK = padding(S)[:, None, None, :]
SEGMENTS = np.tile(np.array([3, 3, 3, 3, 7, 7, 7, 1, 1], np.int32), (B, 1))
POSITIONS = np.maximum(np.cumsum(padding(S), 1) - 1, 0).astype(np.int32)


def encoder(layer=(), *, num_layers=1, **model):
    """A configuration of the sizes of all cases."""
    model = {"vocab_size": V, "num_layers": num_layers, "max_len": MAX_LEN, **model}
    return EncoderOnlyConfig(**model, layer=layer_of({**dict(layer), "causal": False}))


CONFIGS = {
    "BERT": encoder({"placement": "post"}, num_layers=2),
    "RoBERTa": encoder({"placement": "post"}, token_types=0, position_offset=2, pooler=False),
    "ModernBERT": encoder(
        {**GATED, "activation": "gelu", "rotary": ROTARY},
        position="rotary",
        token_types=0,
        final_norm=True,
        pooler=False,
        num_layers=2,
    ),
    "ALiBi": encoder({"placement": "post"}, position="alibi", head_activation="gelu_tanh"),
    "T5's bias": encoder(
        {"norm": "rms", "attention_scale": 1.0},
        position="t5",
        relative_buckets=8,
        relative_max_distance=6,
        embedding_norm=False,
        final_norm=True,
        head_activation="relu",
    ),
    "sinusoidal": encoder(
        position="sinusoidal", embedding_scale=True, embedding_norm=False, token_head=False
    ),
    "no positions": encoder(position="none", embedding_scale=3.0),
}


def case_of(name, config, segments=None):
    # Restarting positions are the model's own, others are given.
    inputs = {
        "tokens": SOURCE,
        "mask": MASK,
        "token_types": TYPES if config.token_types else None,
        "positions": SOURCE_POSITIONS if segments is None else None,
        "segments": segments,
    }
    return Case(
        name=name,
        jax=encoder_only.EncoderOnly,
        torch=reference.EncoderOnly,
        arguments=(config,),
        inputs=inputs,
        place="",
    )


CASES = {name: case_of(name, config) for name, config in CONFIGS.items()}
PACKED = [case_of(f"{name}, packed", CONFIGS[name], SEGMENTS) for name in ("BERT", "ModernBERT")]
declare(
    *CASES.values(),
    *PACKED,
    Case(
        name="mask of segments",
        jax=encoder_only.segment_mask,
        torch=reference.segment_mask,
        inputs={"mask": MASK, "segments": SEGMENTS},
    ),
)


@pytest.mark.parametrize("case", [*CASES.values(), *PACKED], ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("name", ["BERT", "ModernBERT"])
def test_jax_is_as_accurate_as_pytorch(name):
    check_float32(CASES[name], "quick")


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_both_frameworks_have_the_same_number_of_parameters(case):
    theirs = case.torch(*case.arguments)
    assert count_parameters(make_skeleton(case)) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "T5's bias", "no positions"])
def test_the_weights_give_logits_of_order_1_to_10(name):
    results = run_torch(CASES[name], torch.float64)
    *_, logits = (value for key, value in results.items() if key.startswith("output "))
    assert logits.shape == (1, B, S, V)
    assert 1 < logits.std() < 10


def test_segments_and_masks_are_a_literal_table():
    segments, mask = np.array([[4, 4, 0]], np.int32), np.array([[[[True, False, True]]]])
    expected = [[True, False, False], [True, False, False], [False, False, True]]
    for found in (
        encoder_only.segment_mask(jnp.asarray(mask), jnp.asarray(segments)),
        reference.segment_mask(torch.from_numpy(mask), torch.from_numpy(segments)),
    ):
        np.testing.assert_array_equal(found[0, 0], expected)


def make_runs(name):
    """Both models, as functions of arrays that give NumPy hidden states in float64."""
    case = CASES[name]
    theirs = make_reference(case, 0, torch.float32).double()
    with jax.enable_x64(True):
        ours = carry(theirs, make_skeleton(case), "", jnp.float64)
        compiled = jax.jit(lambda *inputs: ours(*inputs).hidden, compiler_options=QUICK)

    def run_ours(*inputs):
        with jax.enable_x64(True):
            return to_numpy(compiled(*inputs))

    def run_theirs(*inputs):
        with torch.no_grad():
            given = [None if array is None else torch.from_numpy(array) for array in inputs]
            return theirs(*given).hidden.numpy()

    return run_ours, run_theirs


KINDS = ["BERT", "ModernBERT", "ALiBi", "T5's bias", "sinusoidal"]


@pytest.mark.parametrize("name", KINDS)
def test_packed_documents_are_each_alone(name):
    packed = SOURCE[:1]
    other = np.where(np.arange(S) < 4, (packed + 1) % V, packed).astype(np.int32)
    segments = np.array([[8] * 4 + [9] * (S - 4)], np.int32)
    for run in make_runs(name):
        found = run(packed, None, None, None, segments)
        np.testing.assert_allclose(found[:, :4], run(packed[:, :4]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[:, 4:], run(packed[:, 4:]), rtol=0, atol=1e-12)
        # Not a bit of the one document is in the other.
        apart = run(other, None, None, None, segments)
        np.testing.assert_array_equal(found[:, 4:], apart[:, 4:])
        assert not np.allclose(found[:, 4:], run(packed)[:, 4:])


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_are_their_tokens_alone(name):
    for run in make_runs(name):
        found = run(SOURCE, MASK, None, POSITIONS)
        for row in range(3):
            real = MASK[row, 0, 0]
            alone = run(SOURCE[row : row + 1, real])
            np.testing.assert_allclose(found[row, real], alone[0], rtol=0, atol=1e-12)
        assert np.isfinite(found).all()


@pytest.mark.parametrize("name", KINDS)
def test_every_token_sees_those_after_it(name):
    later = np.where(np.arange(S) < S - 1, SOURCE, (SOURCE + 1) % V).astype(np.int32)
    for run in make_runs(name):
        changed = np.abs(run(SOURCE) - run(later)).max(axis=-1)
        assert (changed > 1e-6).all()


def test_token_types_are_0_where_none_are_given():
    for run in make_runs("BERT"):
        zeros = np.zeros_like(TYPES)
        np.testing.assert_array_equal(run(SOURCE), run(SOURCE, None, zeros))
        assert not np.allclose(run(SOURCE), run(SOURCE, None, zeros + 1))


def test_what_the_configuration_leaves_out_is_none():
    for name, pooler, token_head in (("RoBERTa", False, True), ("sinusoidal", True, False)):
        model = fresh(lambda name=name: encoder_only.EncoderOnly(CONFIGS[name], rngs=nnx.Rngs(0)))
        theirs = reference.EncoderOnly(CONFIGS[name])
        for found in (model(jnp.asarray(SOURCE)), theirs(torch.from_numpy(SOURCE))):
            assert (found.pooled is not None, found.logits is not None) == (pooler, token_head)


def test_listed_and_stacked_layers_agree():
    def build():
        return encoder_only.EncoderOnly(CONFIGS["BERT"], rngs=nnx.Rngs(0))

    inputs = [jnp.asarray(array) for array in (SOURCE, MASK, TYPES, SOURCE_POSITIONS)]
    with jax.enable_x64(True):
        model = fresh(build, jnp.float64)
        _, params, buffers = split(model)
        stacked_graphdef = split(stack_template(nnx.eval_shape(build)))[0]
        stacked = nnx.merge(stacked_graphdef, stack_layers(params), buffers)
        for listed_part, stacked_part in zip(model(*inputs), stacked(*inputs), strict=True):
            np.testing.assert_allclose(stacked_part, listed_part, rtol=0, atol=1e-12)


@st.composite
def configs(draw):
    """Any combination of the options that are an encoder's own, and of placements and norms."""
    position = draw(st.sampled_from(["none", "sinusoidal", "learned", "rotary", "alibi", "t5"]))
    flag = st.booleans()
    return encoder(
        {
            "norm": draw(st.sampled_from(["layer", "rms"])),
            "placement": draw(st.sampled_from(["post", "pre", "output", "sandwich", "parallel"])),
            "num_kv_heads": draw(st.sampled_from([1, 2, 4])),
            "gated": draw(flag),
            "rotary": RotaryConfig(pairing="adjacent") if position == "rotary" else None,
        },
        position=position,
        token_types=draw(st.sampled_from([0, 2])),
        embedding_norm=draw(flag),
        embedding_scale=draw(st.sampled_from([False, True])),
        final_norm=draw(flag),
        pooler=draw(flag),
        token_head=draw(flag),
        head_activation=draw(st.sampled_from(["gelu", "gelu_tanh", "relu", "silu"])),
    )


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(configs(), st.booleans())
def test_any_combination_of_options_is_the_same_function(config, packed):
    check_float64(case_of("drawn", config, SEGMENTS if packed else None), "quick")
