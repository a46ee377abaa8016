"""Documents packed into rows of one length: little padding, and no document sees another."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jax_transformer.config import BOS_ID, EOS_ID, IGNORED_LABEL, PAD_ID
from jax_transformer.data.buckets import check_at_least
from jax_transformer.data.tokens import TokenDocuments


class PackedBatch(NamedTuple):
    """B rows of T tokens, each with pieces of documents behind one another, then padding."""

    tokens: Int32[np.ndarray, "B T"]
    """`<bos>` and the tokens of each document, then `<pad>`."""
    labels: Int32[np.ndarray, "B T"]
    """What follows each token in its own document, `<eos>` after the last; `IGNORED_LABEL` on
    padding."""
    positions: Int32[np.ndarray, "B T"]
    """0, 1, ... in each piece, and in the padding."""
    segments: Int32[np.ndarray, "B T"]
    """1, 2, ...: which piece of the row a token belongs to; 0 on padding. A token sees those of
    its own number."""

    @staticmethod
    def empty_row() -> dict[str, int]:
        """What an empty row holds, field by field."""
        return {"tokens": PAD_ID, "labels": IGNORED_LABEL, "positions": 0, "segments": 0}


class Ends(NamedTuple):
    """The tokens around a document."""

    start: int = BOS_ID
    end: int = EOS_ID


OWN_ENDS = Ends()


class Pieces(NamedTuple):
    """Stretches of documents that are not cut any further: piece i holds the tokens `starts[i]`
    to `ends[i]` of the inputs of `documents[i]`, which are `<bos>` and its tokens."""

    documents: Int[np.ndarray, " P"]
    starts: Int[np.ndarray, " P"]
    ends: Int[np.ndarray, " P"]


def cut(lengths: Int[np.ndarray, " N"], row_length: int) -> Pieces:
    """Documents of these lengths, `<bos>` included, in pieces of at most `row_length`.

    Only what is longer than a row is cut: the pieces but the last are whole rows.
    """
    counts = -(-lengths // row_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - first[documents]) * row_length
    return Pieces(documents, starts, np.minimum(starts + row_length, lengths[documents]))


def pack(lengths: Int[np.ndarray, " P"], row_length: int) -> list[list[int]]:
    """Which pieces share a row: best fit, the longest first.

    Each piece goes where the least room is left after it, so that almost no padding remains and
    nothing is cut. Source: Ding et al. 2024, "Fewer truncations improve language modeling",
    section 3.
    """
    rows: list[list[int]] = []
    # rows_with[room]: the rows with so much room left.
    rows_with: list[list[int]] = [[] for _ in range(row_length + 1)]
    fullest = np.zeros(row_length + 1, bool)
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        fitting = np.flatnonzero(fullest[length:])
        if len(fitting):
            room = length + int(fitting[0])
            row = rows_with[room].pop()
            fullest[room] = bool(rows_with[room])
            rows[row].append(int(piece))
        else:
            room, row = row_length, len(rows)
            rows.append([int(piece)])
        left = room - length
        rows_with[left].append(row)
        fullest[left] = True
    return rows


class PackedBatches:
    """Training batches whose order is a pure function of (seed, epoch).

    A document is `<bos>`, its tokens and `<eos>`, each but the first a label of the one before.
    The rows are packed once; every epoch shuffles them. In each epoch each document occurs exactly
    once. There is no state to save: a run that stopped before step n goes on with `at(n)`.

    Args:
        documents: token ids, at least one document.
        row_length: T.
        rows: B; the last batch of an epoch is filled up with rows of padding.
        seed: of the order; at least 0.
        around: the tokens around each document.

    Raises:
        InputError: a number out of range.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        *,
        row_length: int,
        rows: int,
        seed: int,
        around: Ends = OWN_ENDS,
    ):
        check_at_least(0, seed=seed)
        check_at_least(1, row_length=row_length, rows=rows)
        self.row_length = row_length
        self.rows = rows
        self._packer = _Packer(documents, row_length, around)
        self._seed = seed
        self._planned: tuple[int, Int[np.ndarray, " R"]] | None = None

    def __len__(self) -> int:
        """Batches in an epoch, the same in every epoch."""
        return len(range(0, len(self._packer.packed), self.rows))

    @property
    def padding(self) -> float:
        """The part of all rows that is padding."""
        used = (self._packer.pieces.ends - self._packer.pieces.starts).sum()
        return 1.0 - float(used) / (len(self._packer.packed) * self.row_length)

    def at(self, step: int) -> PackedBatch:
        """The batch of the 0-based `step`, counted from the beginning of epoch 0."""
        check_at_least(0, step=step)
        epoch, index = divmod(step, len(self))
        rows = self._order(epoch)[index * self.rows : (index + 1) * self.rows]
        return self._packer.batch(rows, height=self.rows)

    def _order(self, epoch: int) -> Int[np.ndarray, " R"]:
        """The rows of `epoch` in order; the latest is kept."""
        if self._planned is None or self._planned[0] != epoch:
            # Raw output of PCG64 is the same in all NumPy versions.
            keys = np.random.PCG64([self._seed, epoch]).random_raw(len(self._packer.packed))
            self._planned = (epoch, np.argsort(keys, kind="stable"))
        return self._planned[1]


def evaluation_packs(
    documents: TokenDocuments, *, row_length: int, rows: int, around: Ends = OWN_ENDS
) -> Iterator[PackedBatch]:
    """Every document once, packed, in a fixed order; the last batch is filled up with padding."""
    check_at_least(1, row_length=row_length, rows=rows)
    packer = _Packer(documents, row_length, around)
    order = np.arange(len(packer.packed))
    return (
        packer.batch(order[start : start + rows], height=rows)
        for start in range(0, len(order), rows)
    )


class _Packer:
    """Documents, cut and packed, and batches of their rows."""

    def __init__(self, documents: TokenDocuments, row_length: int, around: Ends):
        self.documents = documents
        self.around = around
        self.row_length = row_length
        self.pieces = cut(documents.lengths + 1, row_length)
        self.packed = pack(self.pieces.ends - self.pieces.starts, row_length)

    def batch(self, rows: Int[np.ndarray, " R"], *, height: int) -> PackedBatch:
        shape = (height, self.row_length)
        tokens = np.full(shape, PAD_ID, np.int32)
        labels = np.full(shape, IGNORED_LABEL, np.int32)
        positions = np.zeros(shape, np.int32)
        segments = np.zeros(shape, np.int32)
        for index, row in enumerate(rows):
            place = 0
            for number, piece in enumerate(self.packed[row], start=1):
                text = self._text(piece)
                here = slice(place, place + len(text) - 1)
                tokens[index, here], labels[index, here] = text[:-1], text[1:]
                segments[index, here] = number
                positions[index, here] = np.arange(len(text) - 1)
                place = here.stop
            positions[index, place:] = np.arange(self.row_length - place)
        return PackedBatch(tokens, labels, positions, segments)

    def _text(self, piece: int) -> Int[np.ndarray, " T"]:
        """The inputs of a piece and what follows the last of them."""
        document, start, end = (int(column[piece]) for column in self.pieces)
        length = int(self.documents.lengths[document])
        body = self.documents.slice(document, max(start - 1, 0), min(end, length))
        before = [self.around.start] if start == 0 else []
        after = [self.around.end] if end > length else []
        return np.concatenate([before, body, after]).astype(np.int32)
