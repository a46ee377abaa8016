"""Batches: every pair once an epoch, in few shapes, in an order that the seed alone decides."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.config import BOS_ID, EOS_ID, IGNORED_LABEL, PAD_ID
from jax_transformer.data import Batches, Tokenizer, batches, corpora
from jax_transformer.data.batches import evaluation_batches, source_batches
from jax_transformer.errors import InputError

V = 12

# Ids of special tokens too: what is padding must not be told by them.
sentence = st.lists(st.integers(0, V - 1), max_size=40)
pair_lists = st.lists(st.tuples(sentence, sentence), min_size=1, max_size=40)
settings_of_batches = st.fixed_dictionaries(
    {
        "tokens_per_batch": st.integers(1, 200),
        "seed": st.integers(0, 2**64),
        "row_multiple": st.integers(1, 4),
        "max_buckets": st.integers(1, 8),
        "max_length": st.none() | st.integers(41, 60),
    }
)


def make(pairs, **overrides):
    sources, targets = zip(*pairs, strict=True)
    arguments = {"tokens_per_batch": 64, "seed": 0, "vocab_size": V, **overrides}
    return Batches(sources, targets, **arguments)


def lengthy_pairs(count, longest=50, seed=0):
    """Pairs of random lengths whose first source token tells which pair it is."""
    lengths = np.random.default_rng(seed).integers(1, longest, (count, 2))
    return [([i] * s, [i] * t) for i, (s, t) in enumerate(lengths.tolist())]


def pairs_in(batch):
    """The pairs of a batch, read from the lengths, after checking all that is around them."""
    pairs = []
    for source, source_length, decoder_input, labels, target_length in zip(*batch, strict=True):
        assert (source[source_length:] == PAD_ID).all()
        assert (decoder_input[target_length:] == PAD_ID).all()
        assert (labels[target_length:] == IGNORED_LABEL).all()
        assert (source_length == 0) == (target_length == 0)
        if source_length == 0:
            continue
        assert source[source_length - 1] == labels[target_length - 1] == EOS_ID
        assert decoder_input[0] == BOS_ID
        assert (decoder_input[1:target_length] == labels[: target_length - 1]).all()
        pairs.append((source[: source_length - 1].tolist(), labels[: target_length - 1].tolist()))
    return pairs


def assert_equal(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(deadline=None)
@given(pair_lists, settings_of_batches)
def test_an_epoch_holds_every_pair_once_and_as_it_was(pairs, arguments):
    made = make(pairs, **arguments)
    for epoch in (0, 1):
        found = [pair for batch in made.epoch(epoch) for pair in pairs_in(batch)]
        assert sorted(found) == sorted(pairs)
        assert len(list(made.epoch(epoch))) == len(made)


@settings(deadline=None)
@given(pair_lists, settings_of_batches)
def test_batches_have_the_shapes_of_their_few_buckets(pairs, arguments):
    made = make(pairs, **arguments)
    assert len(made.buckets) <= arguments["max_buckets"]
    for length, rows in made.buckets:
        assert length % 8 == 0 or length == arguments["max_length"]
        assert rows % arguments["row_multiple"] == 0
        assert rows * length <= arguments["tokens_per_batch"] or rows == arguments["row_multiple"]
    shapes = {(rows, length) for length, rows in made.buckets}
    for batch in made.epoch(0):
        assert batch.source.shape == batch.decoder_input.shape == batch.labels.shape
        assert batch.source.shape in shapes
        assert batch.source_lengths.shape == batch.target_lengths.shape == (len(batch.source),)
        for array in batch:
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_the_number_of_shapes_does_not_grow_with_the_data():
    made = make(lengthy_pairs(2000, longest=300), vocab_size=2000, tokens_per_batch=1024)
    shapes = [{batch.source.shape for batch in made.epoch(epoch)} for epoch in range(2)]
    assert len(shapes[0]) <= 8
    assert shapes[0] == shapes[1]  # nothing is left to compile after the first epoch


def test_a_batch_is_this_table():
    made = make([([5, 6], [7]), ([8], [9, 10, 11])], row_multiple=3)
    assert len(made) == 1
    source, source_lengths, decoder_input, labels, target_lengths = made.at(0)
    order = np.argsort(-source_lengths)  # the longer source first, the empty row last
    ignored = IGNORED_LABEL
    assert source[order].tolist() == [
        [5, 6, 3, 0, 0, 0, 0, 0],
        [8, 3, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert decoder_input[order].tolist() == [
        [2, 7, 0, 0, 0, 0, 0, 0],
        [2, 9, 10, 11, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert labels[order].tolist() == [
        [7, 3, ignored, ignored, ignored, ignored, ignored, ignored],
        [9, 10, 11, 3, ignored, ignored, ignored, ignored],
        [ignored] * 8,
    ]
    assert source_lengths[order].tolist() == [3, 2, 0]
    assert target_lengths[order].tolist() == [2, 4, 0]


@settings(deadline=None)
@given(pair_lists)
def test_every_eos_keeps_its_label_where_padding_has_the_same_id(pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "PAD_ID", EOS_ID)
        found = list(make(pairs).epoch(0))
    inside = sum(target.count(EOS_ID) for _, target in pairs)
    assert sum((batch.labels == EOS_ID).sum() for batch in found) == len(pairs) + inside
    lengths = [length for batch in found for length in batch.source_lengths if length]
    assert sorted(lengths) == sorted(len(source) + 1 for source, _ in pairs)


def test_a_step_is_a_place_in_an_epoch_whatever_was_asked_before():
    pairs = lengthy_pairs(100)
    made = make(pairs, vocab_size=100, seed=5)
    stream = [batch for epoch in range(3) for batch in made.epoch(epoch)]
    assert len(stream) == 3 * len(made) > 30
    fresh = make(pairs, vocab_size=100, seed=5)
    for step in (len(stream) - 1, 0, len(made), len(made) - 1, 7, 2 * len(made) + 3):
        assert_equal(fresh.at(step), stream[step])


def test_two_epochs_in_turn_do_not_disturb_each_other():
    made = make(lengthy_pairs(100), vocab_size=100)
    alone = [list(made.epoch(epoch)) for epoch in (0, 1)]
    for step, (first, second) in enumerate(zip(made.epoch(0), made.epoch(1), strict=True)):
        assert_equal(first, alone[0][step])
        assert_equal(second, alone[1][step])


def first_tokens(made, epoch):
    return [batch.source[batch.source_lengths > 0, 0].tolist() for batch in made.epoch(epoch)]


def test_epochs_and_seeds_shuffle_pairs_and_batches():
    orders, neighbours = [], []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        made = make(lengthy_pairs(800), vocab_size=800, tokens_per_batch=300, seed=seed)
        found = first_tokens(made, epoch)
        orders.append([len(batch) for batch in found])
        neighbours.append({frozenset(batch) for batch in found})
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert orders[one] != orders[other]  # batches come in another order
        assert not neighbours[one] & neighbours[other]  # ... and no two hold the same pairs


def test_the_order_is_the_same_with_every_version_of_numpy():
    made = make([([i], [i]) for i in range(10)], seed=7, tokens_per_batch=24)
    assert first_tokens(made, 3) == [[6], [3, 5, 1], [8, 9, 0], [2, 4, 7]]


def test_batches_are_the_same_in_every_process():
    script = (
        "import hashlib; from jax_transformer.data import Batches, Tokenizer, corpora\n"
        "text = corpora.load().test\n"
        "tokenizer = Tokenizer.train(text.sources + text.targets, 800)\n"
        "sides = tokenizer.encode_batch(text.sources), tokenizer.encode_batch(text.targets)\n"
        "made = Batches(*sides, tokens_per_batch=512, seed=3, vocab_size=800)\n"
        "digest = hashlib.sha256()\n"
        "[digest.update(array.tobytes()) for batch in made.epoch(1) for array in batch]\n"
        "print(len(made), digest.hexdigest())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != b""


def test_arrays_of_ids_make_the_same_batches_as_lists():
    pairs = lengthy_pairs(30)
    arrays = [(np.array(source, np.uint16), np.array(target)) for source, target in pairs]
    for one, other in zip(
        make(pairs, vocab_size=30).epoch(0), make(arrays, vocab_size=30).epoch(0), strict=True
    ):
        assert_equal(one, other)


def test_at_most_a_quarter_of_the_embedded_corpus_in_batches_is_padding():
    text = corpora.load().train
    tokenizer = Tokenizer.train(text.sources + text.targets, 4000)
    made = Batches(
        tokenizer.encode_batch(text.sources),
        tokenizer.encode_batch(text.targets),
        tokens_per_batch=2048,
        seed=0,
        vocab_size=tokenizer.vocab_size,
    )
    tokens = cells = 0
    for batch in made.epoch(0):
        tokens += batch.source_lengths.sum() + batch.target_lengths.sum()
        cells += batch.source.size + batch.labels.size
    # 0.21 with 8 buckets; a row alone, padded to a multiple of 8 on both sides, wastes 0.19.
    assert 1 - tokens / cells < 0.25


@settings(deadline=None)
@given(pair_lists, st.integers(1, 200), st.integers(1, 4))
def test_evaluation_batches_tell_where_each_row_comes_from(pairs, tokens_per_batch, row_multiple):
    sources, targets = zip(*pairs, strict=True)
    arguments = {
        "tokens_per_batch": tokens_per_batch,
        "row_multiple": row_multiple,
        "vocab_size": V,
    }
    seen = []
    for rows, batch in evaluation_batches(sources, targets, **arguments):
        assert pairs_in(batch) == [pairs[row] for row in rows]
        assert len(batch.source) % row_multiple == 0
        seen.extend(rows)
    assert sorted(seen) == list(range(len(pairs)))
    seen = []
    for rows, source, lengths in source_batches(sources, **arguments):
        for row, tokens, length in zip(rows, source, lengths, strict=False):
            assert tokens[:length].tolist() == [*sources[row], EOS_ID]
            assert (tokens[length:] == PAD_ID).all()
        assert (lengths[len(rows) :] == 0).all()
        seen.extend(rows)
    assert sorted(seen) == list(range(len(pairs)))


def test_a_mean_over_tokens_does_not_depend_on_the_size_of_evaluation_batches():
    pairs = [([4] * n, [4 + n % 8] * n) for n in range(1, 11)]
    sums = []
    for tokens_per_batch in (1, 32, 96, 400):
        found = evaluation_batches(
            *zip(*pairs, strict=True), tokens_per_batch=tokens_per_batch, vocab_size=V
        )
        labels = np.concatenate([batch.labels.ravel() for _, batch in found])
        labels = labels[labels != IGNORED_LABEL]
        sums.append((int(labels.sum()), len(labels)))
    assert sums == [sums[0]] * 4
    assert sums[0][1] == sum(n + 1 for n in range(1, 11))


def test_evaluation_sets_share_a_few_shapes():
    shapes = set()
    for seed in range(6):
        sources, targets = zip(*lengthy_pairs(1000, longest=100, seed=seed), strict=True)
        found = evaluation_batches(sources, targets, tokens_per_batch=2048, vocab_size=1000)
        shapes |= {batch.source.shape for _, batch in found}
    assert shapes == {(64, 32), (32, 64), (16, 128)}


def test_a_single_sentence_is_not_decoded_among_empty_rows():
    (only,) = source_batches([[5, 6, 7]], tokens_per_batch=4096, vocab_size=V)
    assert only.source.shape == (1, 32)


@pytest.mark.parametrize("max_length", [20, 33, 41, 100])
def test_no_row_is_padded_beyond_what_the_model_accepts(max_length):
    pairs = [([5] * (max_length - 1), [6]), ([7], [8] * (max_length - 2)), ([9], [10])]
    for batch in make(pairs, max_length=max_length).epoch(0):
        assert batch.source.shape[1] <= max_length
    arguments = {"tokens_per_batch": 64, "vocab_size": V, "max_length": max_length}
    for _, batch in evaluation_batches(*zip(*pairs, strict=True), **arguments):
        assert batch.source.shape[1] <= max_length


BAD_IDS = [V, -1, 2**70, 1.0, np.float32(1), True, np.True_, "7", None]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("side", ["sources", "targets"])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(side, bad):
    good, wrong = [[4, 5], [6], [7, 8]], [[4, 5], [6], [7, bad]]
    sides = (wrong, good) if side == "sources" else (good, wrong)
    message = rf"^{side}\[2\]\[1\] is .*: a token id must be a whole number from 0 to 11$"
    with pytest.raises(InputError, match=message):
        Batches(*sides, tokens_per_batch=64, seed=0, vocab_size=V)
    with pytest.raises(InputError, match=message):  # at the call, before the first batch
        evaluation_batches(*sides, tokens_per_batch=64, vocab_size=V)


def test_an_array_of_fractions_is_refused():
    with pytest.raises(InputError, match=r"^sources\[0\]\[0\] is "):
        make([(np.array([4.0, 5.0]), [6])])


def test_a_sentence_longer_than_the_model_accepts_is_refused():
    with pytest.raises(InputError, match=r"targets\[1\] has 11 tokens .* max_length=10"):
        make([([4], [5]), ([6], [7] * 10)], max_length=10)
    with pytest.raises(InputError, match=r"sources\[0\] has 11 tokens .* max_length=10"):
        source_batches([[4] * 10], tokens_per_batch=64, vocab_size=V, max_length=10)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tokens_per_batch": 0}, "tokens_per_batch=0: must be at least 1"),
        ({"row_multiple": 0}, "row_multiple=0: must be at least 1"),
        ({"max_buckets": 0}, "max_buckets=0: must be at least 1"),
        ({"max_length": 0}, "max_length=0: must be at least 1"),
        ({"vocab_size": 3}, "vocab_size=3: must be at least 4"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(InputError, match=message):
        make([([1], [2])], **overrides)


def test_data_that_cannot_make_batches_are_refused():
    arguments = {"tokens_per_batch": 64, "vocab_size": V}
    with pytest.raises(InputError, match="2 sources but 1 targets"):
        Batches([[4], [5]], [[6]], seed=0, **arguments)
    for call in (
        lambda: Batches([], [], seed=0, **arguments),
        lambda: evaluation_batches([], [], **arguments),
        lambda: source_batches([], **arguments),
    ):
        with pytest.raises(InputError, match="no sentences"):
            call()


@pytest.mark.parametrize("place", ["at", "epoch"])
def test_time_does_not_run_backwards(place):
    with pytest.raises(InputError, match="-1: must be at least 0"):
        getattr(make([([4], [5])]), place)(-1)
