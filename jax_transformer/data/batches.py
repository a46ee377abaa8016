"""Token lists to batches of a few fixed shapes, in an order that is a function of the seed."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jax_transformer.config import BOS_ID, EOS_ID, IGNORED_LABEL, PAD_ID
from jax_transformer.data.buckets import Bucket, check_at_least, evaluation_layout, fit_buckets
from jax_transformer.errors import InputError

# Ids are checked by value, not by annotation, so that any fault is reported by its place.
TokenLists = Sequence[Collection[Any]]


class Batch(NamedTuple):
    """B sentence pairs, right-padded, for teacher forcing. A row of length 0 is empty.

    What is padding is told by the lengths alone: any id may occur among the tokens.
    """

    source: Int32[np.ndarray, "B S"]
    """The tokens of the source and `<eos>`, then `<pad>`."""
    source_lengths: Int32[np.ndarray, " B"]
    """Tokens of each row of `source`, `<eos>` included; 0 where the row is empty."""
    decoder_input: Int32[np.ndarray, "B T"]
    """`<bos>` and the tokens of the target, then `<pad>`."""
    labels: Int32[np.ndarray, "B T"]
    """The tokens of the target and `<eos>`, then `IGNORED_LABEL`: `decoder_input` one ahead."""
    target_lengths: Int32[np.ndarray, " B"]
    """Tokens of each row of `decoder_input` and of `labels`; 0 where the row is empty."""

    @staticmethod
    def empty_row() -> dict[str, int]:
        """What an empty row holds, field by field."""
        return {
            "source": PAD_ID,
            "source_lengths": 0,
            "decoder_input": PAD_ID,
            "labels": IGNORED_LABEL,
            "target_lengths": 0,
        }


class EvaluationBatch(NamedTuple):
    """A batch and where its rows come from: row i holds pair `rows[i]`; later rows are empty."""

    rows: Int[np.ndarray, " R"]
    batch: Batch


class SourceBatch(NamedTuple):
    """The source side of a batch, for decoding: row i holds sentence `rows[i]`."""

    rows: Int[np.ndarray, " R"]
    source: Int32[np.ndarray, "B S"]
    source_lengths: Int32[np.ndarray, " B"]


class Batches:
    """Training batches whose order is a pure function of (seed, epoch).

    Each pair goes to the bucket that fits its longer side, `<eos>` or `<bos>` included. In every
    epoch each pair occurs exactly once: the pairs are shuffled inside their buckets and the
    batches among each other; the last batch of a bucket is filled up with empty rows. There is
    no state to save: a run that stopped before step n goes on with `at(n)`. The same arguments
    give the same batches with every version of NumPy.

    Args:
        sources: token ids of each source sentence, without special tokens.
        targets: token ids of each target sentence, likewise.
        tokens_per_batch: the most padded tokens on one side of a batch, unless `row_multiple`
            of the longest rows are more.
        seed: of the order; at least 0.
        vocab_size: V; every id must be in [0, V).
        row_multiple: the rows of a batch are a multiple of this (the number of devices).
        max_length: the longest row that the model accepts, `<eos>` included; None for any.
        max_buckets: the most batch shapes, each of which the train step is compiled for.
        target_vocab_size: of the targets, if not V.
        start_id: what a decoder begins with.
        end_id: put after each sentence; None where they have their end.

    Raises:
        InputError: no pairs; different numbers of sources and targets; an id that is not a whole
            number in [0, V); a sentence longer than `max_length`; a number out of range.
    """

    buckets: tuple[Bucket, ...]
    """The batch shapes, shortest first."""

    def __init__(
        self,
        sources: TokenLists,
        targets: TokenLists,
        *,
        tokens_per_batch: int,
        seed: int,
        vocab_size: int,
        row_multiple: int = 1,
        max_length: int | None = None,
        max_buckets: int = 8,
        target_vocab_size: int | None = None,
        start_id: int = BOS_ID,
        end_id: int | None = EOS_ID,
    ) -> None:
        check_at_least(0, seed=seed)
        self._pairs = _Pairs(
            sources,
            targets,
            vocab_size=vocab_size,
            target_vocab_size=target_vocab_size,
            max_length=max_length,
            start_id=start_id,
            end_id=end_id,
        )
        self.buckets = fit_buckets(
            self._pairs.lengths,
            tokens_per_batch=tokens_per_batch,
            row_multiple=row_multiple,
            max_length=max_length,
            max_buckets=max_buckets,
        )
        place = np.searchsorted([bucket.length for bucket in self.buckets], self._pairs.lengths)
        self._members = [np.flatnonzero(place == index) for index in range(len(self.buckets))]
        self._length = sum(
            len(range(0, len(members), bucket.rows))
            for bucket, members in zip(self.buckets, self._members, strict=True)
        )
        self._seed = seed
        self._planned: tuple[int, list[tuple[Bucket, np.ndarray]]] | None = None

    def __len__(self) -> int:
        """Batches in an epoch, the same in every epoch."""
        return self._length

    def at(self, step: int) -> Batch:
        """The batch of the 0-based `step`, counted from the beginning of epoch 0."""
        check_at_least(0, step=step)
        epoch, index = divmod(step, len(self))
        bucket, rows = self._plan(epoch)[index]
        return self._pairs.batch(rows, height=bucket.rows, width=bucket.length)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of the 0-based `epoch`, in order."""
        check_at_least(0, epoch=epoch)
        return (self.at(epoch * len(self) + index) for index in range(len(self)))

    def _plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        """The bucket and the pairs of each batch of `epoch`; the latest plan is kept."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._shuffled(epoch))
        return self._planned[1]

    def _shuffled(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        # Raw output of PCG64 is the same in all NumPy versions; `Generator.permutation` need
        # not be. One key for each pair, then one for each batch.
        generator = np.random.PCG64([self._seed, epoch])
        pair_keys = generator.random_raw(len(self._pairs.lengths))
        batch_keys = generator.random_raw(len(self))
        batches = []
        for bucket, members in zip(self.buckets, self._members, strict=True):
            shuffled = members[np.argsort(pair_keys[members], kind="stable")]
            for start in range(0, len(shuffled), bucket.rows):
                batches.append((bucket, shuffled[start : start + bucket.rows]))
        return [batches[index] for index in np.argsort(batch_keys, kind="stable")]


def evaluation_batches(
    sources: TokenLists,
    targets: TokenLists,
    *,
    tokens_per_batch: int,
    vocab_size: int,
    row_multiple: int = 1,
    max_length: int | None = None,
    target_vocab_size: int | None = None,
    start_id: int = BOS_ID,
    end_id: int | None = EOS_ID,
) -> Iterator[EvaluationBatch]:
    """Every pair once, in a fixed order (by length), with the index of each row.

    Padded lengths are 32, 64, 128, ... (at most `max_length`), so that all evaluation sets share
    a few shapes. Arguments and errors are those of `Batches`; errors are raised at the call.
    """
    check_at_least(1, tokens_per_batch=tokens_per_batch, row_multiple=row_multiple)
    pairs = _Pairs(
        sources,
        targets,
        vocab_size=vocab_size,
        target_vocab_size=target_vocab_size,
        max_length=max_length,
        start_id=start_id,
        end_id=end_id,
    )
    layout = evaluation_layout(pairs.lengths, tokens_per_batch, row_multiple, max_length)
    return (
        EvaluationBatch(rows, pairs.batch(rows, height=bucket.rows, width=bucket.length))
        for bucket, rows in layout
    )


def source_batches(
    sources: TokenLists,
    *,
    tokens_per_batch: int,
    vocab_size: int,
    row_multiple: int = 1,
    max_length: int | None = None,
    end_id: int | None = EOS_ID,
) -> Iterator[SourceBatch]:
    """As `evaluation_batches`, of source sentences alone: what a decoder reads. `end_id` is put
    after each; None where they have their end."""
    check_at_least(1, tokens_per_batch=tokens_per_batch, row_multiple=row_multiple)
    _check_not_empty(sources)
    sentences = _Sentences(
        sources, "sources", vocab_size=vocab_size, max_length=max_length, end_id=end_id
    )
    layout = evaluation_layout(sentences.lengths, tokens_per_batch, row_multiple, max_length)
    return (
        SourceBatch(rows, *sentences.block(rows, bucket.rows, bucket.length, fill=PAD_ID))
        for bucket, rows in layout
    )


class _Sentences:
    """Checked token lists, end to end in one array."""

    def __init__(
        self,
        sentences: TokenLists,
        name: str,
        *,
        vocab_size: int,
        max_length: int | None,
        end_id: int | None = EOS_ID,
    ) -> None:
        check_at_least(EOS_ID + 1, vocab_size=vocab_size)
        if max_length is not None:
            check_at_least(1, max_length=max_length)
        flat = list(chain.from_iterable(sentences))
        if not _all_valid(flat, vocab_size):
            _raise_first_invalid(sentences, name, vocab_size)
        self.counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        self.end_id = end_id
        self.lengths = self.counts + (end_id is not None)
        too_long = np.flatnonzero(self.lengths > (max_length or np.inf))
        if len(too_long):
            raise InputError(
                f"{name}[{too_long[0]}] has {self.lengths[too_long[0]]} tokens with its "
                f"<eos>, more than max_length={max_length}: leave it out or raise the limit"
            )
        self._starts = np.cumsum(self.counts) - self.counts
        self._ids = np.array(flat, np.int32)

    def block(
        self, rows: np.ndarray, height: int, width: int, *, fill: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of `rows` and `end_id`, then `fill`: [height, width], and lengths [height]."""
        counts = self.counts[rows]
        columns = np.arange(width)
        inside = columns < counts[:, None]
        tokens = np.full((height, width), fill, np.int32)
        tokens[: len(rows)][inside] = self._ids[(self._starts[rows, None] + columns)[inside]]
        if self.end_id is not None:
            tokens[np.arange(len(rows)), counts] = self.end_id
        lengths = np.zeros(height, np.int32)
        lengths[: len(rows)] = self.lengths[rows]
        return tokens, lengths


class _Pairs:
    """Checked sentence pairs, and batches of them."""

    def __init__(
        self,
        sources: TokenLists,
        targets: TokenLists,
        *,
        vocab_size: int,
        target_vocab_size: int | None,
        max_length: int | None,
        start_id: int,
        end_id: int | None,
    ) -> None:
        if len(sources) != len(targets):
            raise InputError(
                f"{len(sources)} sources but {len(targets)} targets: "
                f"each source needs exactly one target"
            )
        _check_not_empty(sources)
        limits: Any = {"max_length": max_length, "end_id": end_id}
        self._sources = _Sentences(sources, "sources", vocab_size=vocab_size, **limits)
        self._targets = _Sentences(
            targets, "targets", vocab_size=target_vocab_size or vocab_size, **limits
        )
        self._start_id = start_id
        self.lengths = np.maximum(self._sources.lengths, self._targets.lengths)

    def batch(self, rows: np.ndarray, *, height: int, width: int) -> Batch:
        source, source_lengths = self._sources.block(rows, height, width, fill=PAD_ID)
        labels, target_lengths = self._targets.block(rows, height, width, fill=IGNORED_LABEL)
        # Labels one position later, behind the start; the <eos> of a row shorter than the batch
        # would come along, and is padding here.
        decoder_input = np.full((height, width), PAD_ID, np.int32)
        decoder_input[: len(rows), 0] = self._start_id
        inside = np.arange(1, width) < target_lengths[:, None]
        decoder_input[:, 1:][inside] = labels[:, :-1][inside]
        return Batch(source, source_lengths, decoder_input, labels, target_lengths)


def _all_valid(ids: list[Any], vocab_size: int) -> bool:
    whole = all(
        issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, ids))
    )
    return whole and (not ids or bool(min(ids) >= 0 and max(ids) < vocab_size))


def _raise_first_invalid(sentences: TokenLists, name: str, vocab_size: int) -> None:
    for index, sentence in enumerate(sentences):
        for position, token in enumerate(sentence):
            if not _all_valid([token], vocab_size):
                raise InputError(
                    f"{name}[{index}][{position}] is {token!r}: a token id must be a whole "
                    f"number from 0 to {vocab_size - 1}"
                )


def _check_not_empty(sentences: TokenLists) -> None:
    if len(sentences) == 0:
        raise InputError("no sentences to make batches of: give at least one")
