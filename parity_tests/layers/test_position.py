"""Position encodings: the table of the paper, at every position, for every width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.whisper import modeling_whisper as whisper

from jax_transformer.errors import InputError
from jax_transformer.layers import position
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    to_numpy,
)
from parity_tests.inputs import MAX_LEN, SOURCE_POSITIONS, B, D, S, normal, padding
from torch_reference.layers import position as reference

KINDS = ("SinusoidalPositionalEncoding", "LearnedPositionalEncoding")

CASES = declare(
    *(
        Case(
            name=f"{kind}, width {width}, {'default' if positions is None else 'long'} positions",
            jax=getattr(position, kind),
            torch=getattr(reference, kind),
            arguments=(width, MAX_LEN),
            inputs={"x": normal(B, S, width), "positions": positions},
            place="encoder.pos_encoding",
        )
        for kind in KINDS
        for width, positions in ((D, SOURCE_POSITIONS), (5, SOURCE_POSITIONS), (1, None))
    ),
    *(
        Case(
            name=f"sines before cosines, width {width}, {'one closed' if closed else 'open'} range",
            jax=position.SinusoidalPositionalEncoding,
            torch=reference.SinusoidalPositionalEncoding,
            arguments=(width, MAX_LEN, 0.1, True, closed),
            inputs={"x": normal(B, S, width), "positions": SOURCE_POSITIONS},
            place="encoder.pos_encoding",
        )
        for width, closed in ((D, False), (5, False), (D, True))
    ),
    *(
        Case(
            name=f"learned with offset 2, {'default' if positions is None else 'padded'} positions",
            jax=position.LearnedPositionalEncoding,
            torch=reference.LearnedPositionalEncoding,
            arguments=(D, MAX_LEN, 0.1, 2),
            inputs={"x": normal(B, S, D), "positions": positions},
            place="pos_encoding",
        )
        # Padding reads the row before that of position 0.
        for positions in (None, np.where(padding(S), SOURCE_POSITIONS, -1).astype(np.int32))
    ),
)


@pytest.mark.parametrize("mode", ["quick", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case, mode):
    check_float64(case, mode)


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit")


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 512])
def test_both_tables_are_the_formula_of_the_paper_at_every_position(width):
    ours, theirs = (
        position.sinusoidal_table(MAX_LEN, width),
        reference.sinusoidal_table(MAX_LEN, width),
    )
    assert ours.dtype == np.float64
    assert theirs.dtype == torch.float64
    expected = np.empty((MAX_LEN, width))
    for column in range(width):
        angle = np.arange(MAX_LEN) / 10000.0 ** (2 * (column // 2) / width)
        expected[:, column] = np.cos(angle) if column % 2 else np.sin(angle)
    # An angle of 5000 radians is off by its own rounding, 5000 * 2**-53, and its frequency's.
    np.testing.assert_allclose(ours, expected, rtol=0, atol=4 * 5000 * 2.0**-53)
    np.testing.assert_allclose(theirs.numpy(), expected, rtol=0, atol=4 * 5000 * 2.0**-53)
    # What the modules hold is that, rounded once.
    held = position.SinusoidalPositionalEncoding(width, MAX_LEN).pe[0]
    np.testing.assert_allclose(held, expected, rtol=0, atol=2.0**-25 + 1e-11)


def test_sines_and_cosines_alternate():
    expected = [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)]
    np.testing.assert_allclose(position.sinusoidal_table(2, 4)[1], expected, rtol=1e-15)
    np.testing.assert_allclose(reference.sinusoidal_table(2, 4)[1], expected, rtol=1e-15)


def test_with_halves_all_sines_come_first():
    for table in (position.sinusoidal_table, reference.sinusoidal_table):
        expected = [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)]
        np.testing.assert_allclose(table(2, 4, halves=True)[1], expected, rtol=1e-15)
        np.testing.assert_array_equal(table(1, 5, halves=True), [[0, 0, 0, 1, 1]])


@pytest.mark.parametrize("width", [4, 6, 384])
def test_with_the_endpoint_both_tables_are_the_formula_of_whisper(width):
    half = width // 2
    angles = np.arange(40)[:, None] / 10000.0 ** (np.arange(half) / (half - 1))
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    for table in (position.sinusoidal_table, reference.sinusoidal_table):
        found = table(40, width, halves=True, endpoint=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    theirs = whisper.sinusoids(40, width).numpy()  # in float32
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=40 * 2.0**-23)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_with_the_endpoint_one_or_two_frequencies_begin_at_1(width):
    expected = [np.sin(1), np.cos(1), np.sin(1e-4)][:width]
    for table in (position.sinusoidal_table, reference.sinusoidal_table):
        np.testing.assert_allclose(table(2, width, endpoint=True)[1], expected, rtol=1e-15)


def test_an_odd_width_has_one_cosine_fewer():
    np.testing.assert_array_equal(position.sinusoidal_table(1, 5), [[0, 1, 0, 1, 0]])
    np.testing.assert_array_equal(reference.sinusoidal_table(1, 5), [[0, 1, 0, 1, 0]])


def make(kind, max_len):
    ours = getattr(position, kind)
    rngs = {} if kind == "SinusoidalPositionalEncoding" else {"rngs": nnx.Rngs(0)}
    return ours(4, max_len, **rngs), getattr(reference, kind)(4, max_len).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_as_long_as_the_table_passes_and_one_longer_is_refused(kind):
    ours, theirs = make(kind, 6)
    for length in (5, 6):
        assert jnp.isfinite(ours(jnp.zeros((1, length, 4)))).all()
        assert theirs(torch.zeros(1, length, 4)).isfinite().all()
    with pytest.raises(InputError, match="7 tokens is longer than the position table of 6 rows"):
        ours(jnp.zeros((1, 7, 4)))
    with pytest.raises(InputError, match="7 tokens is longer than the position table of 6 rows"):
        theirs(torch.zeros(1, 7, 4))


@pytest.mark.parametrize("outside", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_position_outside_the_table_does_not_read_another_row(kind, outside):
    ours, theirs = make(kind, 6)
    positions = np.array([[5, outside]], np.int32)
    encoded = to_numpy(jax.jit(lambda x, p: ours(x, p))(jnp.zeros((1, 2, 4)), positions))
    assert np.isfinite(encoded[0, 0]).all()
    assert np.isnan(encoded[0, 1]).all()
    with pytest.raises(IndexError):
        theirs(torch.zeros(1, 2, 4), torch.from_numpy(positions))


def test_both_share_their_rows_for_equal_positions():
    ours, _ = make("SinusoidalPositionalEncoding", 6)
    positions = jnp.asarray([[0, 1, 2], [0, 0, 1]], jnp.int32)
    encoded = ours(jnp.zeros((2, 3, 4)), positions)
    np.testing.assert_array_equal(encoded[1, 1:], encoded[0, :2])
    np.testing.assert_array_equal(encoded[0], ours(jnp.zeros((1, 3, 4)))[0])


def test_the_rows_of_an_offset_come_before_that_of_position_0():
    ours = position.LearnedPositionalEncoding(4, 6, offset=2, rngs=nnx.Rngs(0))
    theirs = reference.LearnedPositionalEncoding(4, 6, offset=2).eval()
    table = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    ours.pos_embedding.embedding[...] = jnp.asarray(table)
    with torch.no_grad():
        theirs.pos_embedding.weight.copy_(torch.from_numpy(table))
    positions = np.array([[-2, -1, 0, 1, 5]], np.int32)
    expected = table[None, [0, 1, 2, 3, 7]]
    found = ours(jnp.zeros((1, 5, 4)), jnp.asarray(positions))
    np.testing.assert_array_equal(found, expected)
    found = theirs(torch.zeros(1, 5, 4), torch.from_numpy(positions))
    np.testing.assert_array_equal(found.detach(), expected)
    np.testing.assert_array_equal(ours(jnp.zeros((1, 6, 4)))[0], table[2:])
    np.testing.assert_array_equal(theirs(torch.zeros(1, 6, 4))[0].detach(), table[2:])
    # As long as max_len, whatever comes before.
    for module, x in ((ours, jnp.zeros((1, 7, 4))), (theirs, torch.zeros(1, 7, 4))):
        with pytest.raises(InputError, match="7 tokens is longer than the position table of 6"):
            module(x)
