"""Packed rows: literal ones, every token once, and training as if nothing were packed."""

import hashlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.config import (
    BOS_ID,
    EOS_ID,
    IGNORED_LABEL,
    DecoderOnlyConfig,
    LayerConfig,
    RotaryConfig,
)
from jax_transformer.data.packing import PackedBatch, PackedBatches, cut, evaluation_packs, pack
from jax_transformer.data.tokens import TokenDocuments
from jax_transformer.errors import InputError
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.parameters import cast, flatten, split
from jax_transformer.training.step import language_loss
from parity_tests.harness import QUICK, pair, to_numpy
from torch_reference.models import decoder_only as reference
from torch_reference.training import step as reference_step


def documents(*texts):
    lengths = np.array([len(text) for text in texts], np.int64)
    ends = np.cumsum(lengths)
    ids = np.array([token for text in texts for token in text], np.uint16)
    return TokenDocuments(ids=ids, starts=ends - lengths, ends=ends, num_bytes=len(ids))


def drawn(*lengths):
    """Documents of these lengths, no two tokens in a row equal."""
    generator = np.random.default_rng(0)
    return documents(*(4 + generator.integers(0, 9, length) for length in lengths))


def test_a_batch_is_these_numbers():
    (batch,) = evaluation_packs(documents([11, 12], [21, 22, 23, 24], [31]), row_length=6, rows=2)
    x = IGNORED_LABEL
    assert batch.tokens.tolist() == [[2, 21, 22, 23, 24, 0], [2, 11, 12, 2, 31, 0]]
    assert batch.labels.tolist() == [[21, 22, 23, 24, 3, x], [11, 12, 3, 31, 3, x]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 0]]


def test_a_document_longer_than_a_row_is_cut_and_predicts_across_the_cut():
    (batch,) = evaluation_packs(documents([11, 12, 13, 14, 15, 16, 17]), row_length=3, rows=3)
    assert batch.tokens.tolist() == [[2, 11, 12], [13, 14, 15], [16, 17, 0]]
    assert batch.labels.tolist() == [[11, 12, 13], [14, 15, 16], [17, 3, IGNORED_LABEL]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0]]
    # Whole rows: `<bos>` and two tokens; the next three; `<eos>` alone is never an input.
    (batch,) = evaluation_packs(documents([11, 12, 13, 14, 15]), row_length=3, rows=2)
    assert batch.labels.tolist() == [[11, 12, 13], [14, 15, 3]]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    row_length=st.integers(1, 16),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_an_input_once_and_a_label_once(lengths, row_length):
    texts = [[100 * i + j for j in range(length)] for i, length in enumerate(lengths, start=1)]
    batches = list(evaluation_packs(documents(*texts), row_length=row_length, rows=3))
    assert all(batch.tokens.shape == (3, row_length) for batch in batches)
    used = [batch.segments > 0 for batch in batches]
    inputs = np.concatenate([b.tokens[u] for b, u in zip(batches, used, strict=True)])
    labels = np.concatenate([b.labels[u] for b, u in zip(batches, used, strict=True)])
    assert sorted(inputs) == sorted([token for text in texts for token in [BOS_ID, *text]])
    assert sorted(labels) == sorted([token for text in texts for token in [*text, EOS_ID]])
    for batch, inside in zip(batches, used, strict=True):
        assert (batch.labels[~inside] == IGNORED_LABEL).all()
        assert (batch.positions < row_length).all()


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_rows_are_filled_as_well_as_best_fit_does(lengths):
    rows = pack(np.array(lengths), 16)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in row) for row in rows]
    assert max(filled) <= 16
    # Best fit decreasing needs at most 11/9 of the fewest rows possible, and one.
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 16) + 1 or min(lengths) > 5


def test_shakespeares_lengths_leave_hardly_any_padding():
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.geometric(1 / 90, 3000), 4000)
    pieces = cut(lengths, 256)
    rows = pack(pieces.ends - pieces.starts, 256)
    assert lengths.sum() / (256 * len(rows)) > 0.99


def test_an_epoch_has_every_row_once_and_each_epoch_another_order():
    batches = PackedBatches(drawn(*range(1, 30)), row_length=16, rows=4, seed=3)
    rows = [
        {row.tobytes() for step in range(len(batches))
         for row in batches.at(epoch * len(batches) + step).tokens}
        for epoch in range(2)
    ]  # fmt: skip
    assert rows[0] == rows[1]
    first, second = batches.at(0), batches.at(len(batches))
    assert (first.tokens != second.tokens).any()
    np.testing.assert_array_equal(batches.at(0).tokens, first.tokens)
    other = PackedBatches(drawn(*range(1, 30)), row_length=16, rows=4, seed=4)
    assert (other.at(0).tokens != first.tokens).any()


def test_batches_are_the_same_in_every_process():
    code = (
        "import hashlib, numpy as np\n"
        "from jax_transformer.data.packing import PackedBatches\n"
        "from jax_transformer.data.tokens import TokenDocuments\n"
        "lengths = np.arange(1, 40)\n"
        "ends = np.cumsum(lengths)\n"
        "ids = np.arange(ends[-1]) % 50 + 4\n"
        "held = TokenDocuments(ids=ids, starts=ends - lengths, ends=ends, num_bytes=1)\n"
        "batches = PackedBatches(held, row_length=24, rows=4, seed=7)\n"
        "digest = hashlib.sha256()\n"
        "for step in range(20):\n"
        "    for field in batches.at(step): digest.update(field.tobytes())\n"
        "print(digest.hexdigest())\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    lengths = np.arange(1, 40)
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1]) % 50 + 4
    held = TokenDocuments(ids=ids, starts=ends - lengths, ends=ends, num_bytes=1)
    batches = PackedBatches(held, row_length=24, rows=4, seed=7)
    digest = hashlib.sha256()
    for step in range(20):
        for field in batches.at(step):
            digest.update(field.tobytes())
    assert run.stdout.strip() == digest.hexdigest(), run.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"row_length": 0}, "row_length=0"), ({"rows": 0}, "rows=0"), ({"seed": -1}, "seed=-1")],
)
def test_numbers_out_of_range_are_refused(changes, message):
    arguments = {"row_length": 8, "rows": 2, "seed": 0, **changes}
    with pytest.raises(InputError, match=message):
        PackedBatches(drawn(3), **arguments)


LENGTHS = (5, 9, 3, 12, 1, 7)
VOCABULARY = 16


def config(position, **layer):
    rotary = RotaryConfig(pairing="half") if position == "rotary" else None
    return DecoderOnlyConfig(
        vocab_size=VOCABULARY, num_layers=2, position=position, max_len=16,
        # The bias of keys has no gradient but rounding: softmax does not see it.
        layer=LayerConfig(
            d_model=8, num_heads=2, d_ff=16, rotary=rotary, qkv_bias=False, causal=True, **layer
        ),
    )  # fmt: skip


def unpacked(held):
    """A row for each document, right-padded, as if there were no segments."""
    shape = (len(held), max(LENGTHS) + 1)
    tokens, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED_LABEL, np.int32)
    for row, length in enumerate(LENGTHS):
        text = [BOS_ID, *held.slice(row, 0, length), EOS_ID]
        tokens[row, : length + 1], labels[row, : length + 1] = text[:-1], text[1:]
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return PackedBatch(tokens, labels, positions, np.ones(shape, np.int32))


@pytest.mark.parametrize(
    "model",
    [
        config("rotary", norm="rms", gated=True, num_kv_heads=1),
        config("learned"),
        config("alibi"),
        config("t5", window=4),
    ],
    ids=["rotary", "learned", "alibi", "t5 and window"],
)
def test_loss_and_gradients_are_those_of_unpacked_documents(model):
    held = drawn(*LENGTHS)
    with jax.enable_x64(True):
        graphdef, params, buffers = split(DecoderOnly(model, rngs=nnx.Rngs(0)))
        params = cast(params, jnp.float64)
        # Logits that matter: initial ones are nearly equal.
        params = jax.tree.map(lambda leaf: leaf * 8.0 if leaf.ndim > 1 else leaf, params)
        compute = jax.jit(
            jax.value_and_grad(
                lambda params, batch: language_loss(graphdef, params, buffers, batch).total
            ),
            compiler_options=QUICK,
        )
        (packed,) = evaluation_packs(held, row_length=16, rows=4)
        assert (packed.segments.max(axis=1) > 1).any()
        assert (packed.segments == 0).any()
        loss, gradients = compute(params, packed)
        expected, wanted = compute(params, unpacked(held))
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        wanted = flatten(wanted)
        for name, leaf in flatten(gradients).items():
            scale = np.abs(wanted[name]).max()
            np.testing.assert_allclose(leaf, wanted[name], rtol=0, atol=1e-12 * scale)


def test_the_loss_is_that_of_the_reference():
    model = config("rotary", norm="rms", gated=True)
    with jax.enable_x64(True):
        ours, theirs = pair_of(model)
        graphdef, params, buffers = split(ours)
        (packed,) = evaluation_packs(drawn(*LENGTHS), row_length=16, rows=4)
        loss = jax.jit(
            lambda params, batch: language_loss(
                graphdef, params, buffers, batch, label_smoothing=0.1
            ),
            compiler_options=QUICK,
        )(params, packed)
        tensors = PackedBatch(*map(torch.from_numpy, packed))
        expected = reference_step.language_loss(theirs, tensors, label_smoothing=0.1)
        np.testing.assert_allclose(loss.total, to_numpy(expected.total), rtol=1e-12)
        assert int(loss.count) == int(expected.count) == sum(LENGTHS) + len(LENGTHS)


def pair_of(model):
    theirs, ours = pair(
        reference.DecoderOnly(model), lambda: DecoderOnly(model, rngs=nnx.Rngs(0)), jnp.float64
    )
    return ours, theirs.double()
