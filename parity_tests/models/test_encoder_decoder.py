"""The full model: every pair of option values, and what padding may not change."""

import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer import config as options
from jax_transformer.config import ModelConfig
from jax_transformer.errors import InputError
from jax_transformer.models import encoder_decoder
from jax_transformer.models.parameters import count_parameters, flatten, split
from parity_tests.harness import (
    QUICK,
    Case,
    check_float32,
    check_float64,
    declare,
    make_pair,
    make_skeleton,
    parameters_of,
    run_torch,
    to_numpy,
)
from parity_tests.inputs import (
    MAX_LEN,
    SOURCE,
    SOURCE_MASK,
    SOURCE_POSITIONS,
    TARGET,
    TARGET_MASK,
    TARGET_POSITIONS,
    B,
    D,
    F,
    N,
    S,
    T,
    V,
    normal,
    padding,
)
from torch_reference.models import encoder_decoder as reference

# Every value of every option, and (d_model, num_heads): an odd width, too.
FACTORS = {
    "norm_placement": get_args(options.NormPlacement),
    "activation": ("gelu", "relu"),
    "position_encoding": get_args(options.PositionEncoding),
    "tied_tables": get_args(options.TiedTables),
    "width": ((16, 4), (15, 3)),
}

COMBINATIONS = [
    dict(zip(FACTORS, values, strict=True))
    for values in (
        ("post", "gelu", "sinusoidal", "none", (16, 4)),
        ("pre", "relu", "learned", "none", (15, 3)),
        ("post", "relu", "learned", "decoder", (16, 4)),
        ("pre", "gelu", "sinusoidal", "decoder", (15, 3)),
        ("post", "gelu", "learned", "all", (15, 3)),
        ("pre", "relu", "sinusoidal", "all", (16, 4)),
    )
]

MODEL_INPUTS = {
    "src": SOURCE,
    "tgt": TARGET,
    "src_mask": SOURCE_MASK,
    "tgt_mask": TARGET_MASK,
    "src_positions": SOURCE_POSITIONS,
    "tgt_positions": TARGET_POSITIONS,
}


def model_case(combination):
    values = dict(combination)
    d_model, num_heads = values.pop("width")
    # Two layers of each kind once, so that swapped ones show.
    depth = 2 if values["tied_tables"] == "all" and values["norm_placement"] == "pre" else 1
    return Case(
        name=", ".join(map(str, combination.values())),
        jax=encoder_decoder.Transformer,
        torch=reference.Transformer,
        arguments=(V, V, d_model, num_heads, F, depth, depth, MAX_LEN),
        options=values,
        inputs=MODEL_INPUTS,
        place="",
    )


MODELS = declare(*map(model_case, COMBINATIONS))
HALVES = declare(
    Case(
        name="encoder",
        jax=encoder_decoder.TransformerEncoder,
        torch=reference.TransformerEncoder,
        arguments=(V, D, N, F, 1, MAX_LEN),
        inputs={"src": SOURCE, "src_mask": SOURCE_MASK, "positions": SOURCE_POSITIONS},
        place="encoder",
    ),
    Case(
        name="decoder",
        jax=encoder_decoder.TransformerDecoder,
        torch=reference.TransformerDecoder,
        arguments=(V, D, N, F, 1, MAX_LEN),
        options={"norm_placement": "pre"},
        inputs={
            "tgt": TARGET,
            "enc_output": normal(B, S, D),
            "src_mask": SOURCE_MASK,
            "tgt_mask": TARGET_MASK,
            "positions": TARGET_POSITIONS,
        },
        place="decoder",
    ),
)


def test_every_pair_of_option_values_is_combined():
    for first, second in itertools.combinations(FACTORS, 2):
        wanted = set(itertools.product(FACTORS[first], FACTORS[second]))
        assert {(c[first], c[second]) for c in COMBINATIONS} == wanted


@pytest.mark.parametrize("case", MODELS + HALVES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


def test_both_frameworks_compute_the_same_function_op_by_op():
    check_float64(MODELS[0], "op by op")


@pytest.mark.parametrize("case", [MODELS[3], MODELS[4], *HALVES], ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "quick")


def test_compiled_as_users_do_jax_is_as_accurate_as_pytorch():
    check_float32(MODELS[0], "jit")


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_the_weights_give_logits_of_order_1_to_10(case):
    assert 1 < run_torch(case, torch.float64)["output 0"].std() < 10


CONFIG = ModelConfig(
    src_vocab_size=V,
    tgt_vocab_size=V,
    d_model=D,
    num_heads=N,
    d_ff=F,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=20,
)


@pytest.fixture(scope="module")
def pair():
    """The two models, as functions of arrays that give NumPy logits in float64."""
    with jax.enable_x64(True):
        theirs, ours = make_pair(CONFIG, jnp.float64)
        compiled = jax.jit(lambda *inputs: ours(*inputs), compiler_options=QUICK)

    def run_ours(*inputs):
        with jax.enable_x64(True):
            return to_numpy(compiled(*inputs))

    def run_theirs(*inputs):
        with torch.no_grad():
            return theirs(*map(torch.from_numpy, inputs)).numpy()

    return run_ours, run_theirs


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("target_length", [3, 5])
def test_a_padded_source_token_changes_no_logit(pair, target_length, side):
    # Square, too: there a mask on the wrong axis has a fitting shape.
    source = np.array([[4, 5, 6], [7, 8, 9]], np.int32)
    target = np.arange(2 * target_length, dtype=np.int32).reshape(2, -1)
    real = np.array([[1, 1, 1], [0, 1, 1] if side == "left" else [1, 1, 0]], bool)
    masks = real[:, None, None, :], np.tril(np.ones((1, 1, target_length, target_length), bool))
    changed = np.where(real, source, 12)
    for run in pair:
        np.testing.assert_array_equal(run(source, target, *masks), run(changed, target, *masks))
        # While a real one does.
        assert not np.array_equal(run(source, target, *masks), run(source + real, target, *masks))


def test_no_logit_depends_on_a_later_token(pair):
    later = np.where(np.arange(T) < 4, TARGET, (TARGET + 1) % V).astype(np.int32)
    mask = np.tril(np.ones((1, 1, T, T), bool))
    for run in pair:
        before = run(SOURCE, TARGET, SOURCE_MASK, mask)
        after = run(SOURCE, later, SOURCE_MASK, mask)
        np.testing.assert_array_equal(before[:, :4], after[:, :4])
        assert not np.allclose(before[:, 4:], after[:, 4:])


def test_a_left_padded_row_gives_the_logits_of_its_sentence_alone(pair):
    real_source, real_target = SOURCE_MASK[2, 0, 0], TARGET_MASK[2, 0, -1]
    alone = SOURCE[2:3, real_source], TARGET[2:3, real_target]
    length = alone[1].shape[1]
    masks = (
        np.ones((1, 1, 1, alone[0].shape[1]), bool),
        np.tril(np.ones((1, 1, length, length), bool)),
    )
    batch = (SOURCE, TARGET, SOURCE_MASK, TARGET_MASK)
    counted = [np.maximum(np.cumsum(padding(n), 1) - 1, 0).astype(np.int32) for n in (S, T)]
    for run in pair:
        expected = run(*alone, *masks)
        found = run(*batch, *counted)[2:3, real_target]
        # Sums over keys that weigh nothing are in another order: a few ulp.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        shifted = run(*batch)[2:3, real_target]
        assert not np.allclose(shifted, expected)


def test_an_empty_row_adds_nothing_to_the_gradients():
    # Its loss weighs nothing; NaN times nothing would.
    inputs = [array[[0, 3]] for array in (SOURCE, TARGET, SOURCE_MASK, TARGET_MASK)]
    with jax.enable_x64(True):
        theirs, ours = make_pair(CONFIG, jnp.float64)
        graphdef, params, buffers = split(ours)

    def ours_of(*inputs):
        def loss(params, *inputs):
            return jnp.square(nnx.merge(graphdef, params, buffers)(*inputs)[0]).sum()

        with jax.enable_x64(True):
            return flatten(jax.jit(jax.grad(loss), compiler_options=QUICK)(params, *inputs))

    def theirs_of(*inputs):
        theirs.zero_grad()
        theirs(*map(torch.from_numpy, inputs))[0].square().sum().backward()
        return {name: parameter.grad for name, parameter in theirs.named_parameters()}

    for gradients_of in (ours_of, theirs_of):
        both, alone = gradients_of(*inputs), gradients_of(*(array[:1] for array in inputs))
        largest = max(np.abs(to_numpy(gradient)).max() for gradient in alone.values())
        for name, gradient in alone.items():
            np.testing.assert_allclose(
                to_numpy(both[name]), to_numpy(gradient), rtol=0, atol=1e-13 * largest
            )


def test_cross_attention_weights_agree_and_share_out_one_among_real_tokens():
    with jax.enable_x64(True):
        theirs, ours = make_pair(CONFIG, jnp.float64)
        enc_output = normal(B, S, D).astype(np.float64)
        inputs = (TARGET, enc_output, SOURCE_MASK, TARGET_MASK)
        found = ours.decoder.cross_attention(*map(jnp.asarray, inputs))
        expected = theirs.decoder.cross_attention(*map(torch.from_numpy, inputs))
    assert len(found) == len(expected) == CONFIG.num_decoder_layers
    for ours_, theirs_ in zip(found, expected, strict=True):
        weights = to_numpy(ours_)
        np.testing.assert_allclose(weights, to_numpy(theirs_), rtol=0, atol=1e-13)
        assert weights.shape == (B, N, T, S)
        np.testing.assert_allclose(weights[:3].sum(-1), 1.0, rtol=1e-13)
        np.testing.assert_array_equal(weights[3], 0.0)
        hidden = np.broadcast_to(~SOURCE_MASK, weights.shape)
        np.testing.assert_array_equal(weights[hidden], 0.0)


def test_embeddings_are_scaled_by_the_root_of_the_width():
    with jax.enable_x64(True):
        theirs, ours = make_pair(CONFIG, jnp.float64)
        table = theirs.decoder.embedding.weight.detach().numpy()
        expected = table[TARGET] * np.sqrt(D) + theirs.decoder.pos_encoding.pe.numpy()[:, :T]
        found = to_numpy(ours.decoder.embed(jnp.asarray(TARGET)))
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(
        to_numpy(theirs.decoder.embed(torch.from_numpy(TARGET))), expected, rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_sequence_longer_than_the_position_table_is_refused(pair, side):
    lengths = {"source": 5, "target": 5, side: CONFIG.max_len + 1}
    source, target = (np.full((1, lengths[name]), 4, np.int32) for name in ("source", "target"))
    masks = np.ones((1, 1, 1, source.shape[1]), bool), np.ones((1, 1, 1, target.shape[1]), bool)
    for run in pair:
        with pytest.raises(InputError, match="21 tokens is longer than the position table of 20"):
            run(source, target, *masks)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_both_frameworks_have_the_same_number_of_parameters(case):
    theirs = case.torch(*case.arguments, **case.options)
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(parameter.numel() for parameter in parameters_of(theirs).values()) == expected
    assert count_parameters(make_skeleton(case)) == expected
