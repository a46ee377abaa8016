"""Documents as token ids, end to end in one array: in memory, or in a file that is mapped."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jax_transformer.data.characters import TextTokenizer, load_tokenizer
from jax_transformer.data.documents import PARTS, Part
from jax_transformer.errors import InputError

_BLOCK = 1 << 24
"""Ids that are checked at a time."""

_DOCUMENTS_PER_CALL = 256
"""Documents that a tokenizer is given at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenDocuments:
    """Document i is `ids[ends[i - 1]:ends[i]]`, without special tokens."""

    ids: np.ndarray
    """Of all documents; may be mapped from a file."""
    starts: Int[np.ndarray, " N"]
    ends: Int[np.ndarray, " N"]
    num_bytes: int
    """Of the text, in UTF-8."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Int[np.ndarray, " N"]:
        """Tokens of each document."""
        return self.ends - self.starts

    def slice(self, document: int, start: int, end: int) -> Int[np.ndarray, " T"]:
        """Tokens `start` to `end` of a document."""
        first = int(self.starts[document])
        end = min(end, int(self.ends[document]) - first)
        return np.asarray(self.ids[first + start : first + end], np.int32)


def tokenize(documents: Iterable[str], tokenizer: TextTokenizer) -> TokenDocuments:
    """Documents to ids, in memory.

    Raises:
        InputError: as the tokenizer's `encode`, or as the documents are read.
    """
    arrays, num_bytes = [], 0
    for ids, size in _encoded(documents, tokenizer):
        arrays.append(ids.astype(_dtype(tokenizer.vocab_size)))
        num_bytes += size
    ends = np.cumsum([len(ids) for ids in arrays], dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    return TokenDocuments(ids=np.concatenate(arrays), starts=starts, ends=ends, num_bytes=num_bytes)


def write_tokens(path: Path, parts: Mapping[Part, Iterable[str]], tokenizer: TextTokenizer) -> None:
    """Write documents as ids, so that a corpus larger than memory can be trained on.

    Four files, `corpus.bin` being `path`: the ids, `uint16` or `uint32`, of the documents to
    train on, then to validate and to test with; `corpus.documents.npy`, the number of ids and of
    bytes up to the end of each document, [N, 2]; `corpus.tokenizer.json`; and, last,
    `corpus.json`, which says how many of what there are.

    Raises:
        InputError: `path` does not end in `.bin` or is there already; as the documents are read.
    """
    check_output(path)
    dtype = _dtype(tokenizer.vocab_size)
    ends: list[tuple[int, int]] = []
    counts: dict[str, int] = {}
    tokens = num_bytes = 0
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        for part in PARTS:
            before = len(ends)
            for ids, size in _encoded(parts[part], tokenizer):
                file.write(ids.astype(dtype).tobytes())
                tokens, num_bytes = tokens + len(ids), num_bytes + size
                ends.append((tokens, num_bytes))
            counts[part] = len(ends) - before
    np.save(_beside(path, ".documents.npy"), np.array(ends, np.int64))
    tokenizer.save(_beside(path, ".tokenizer.json"))
    partial.replace(path)
    header = {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokens": tokens,
        "documents": counts,
    }
    _beside(path, ".json").write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


def check_output(path: Path) -> None:
    """Refuse to write over anything.

    Raises:
        InputError: `path` does not end in `.bin`, is there already, or has no directory.
    """
    if path.suffix != ".bin":
        raise InputError(f"{path}: a file of tokens has a name that ends in .bin")
    if path.exists() or _beside(path, ".json").exists():
        raise InputError(f"{path} is there already: choose another name")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the directory {path.parent} is not there")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFile:
    """What `write_tokens` has written, its ids mapped and not read into memory."""

    parts: Mapping[Part, TokenDocuments]
    tokenizer: TextTokenizer
    sha256: str
    """Of the ids and of where the documents end."""


def open_tokens(path: Path) -> TokenFile:
    """Map a file of tokens, after one look at each id.

    Raises:
        InputError: a file is missing or damaged, the files do not fit each other, or an id is
            outside the vocabulary (with its place).
    """
    header = _read_header(_beside(path, ".json"))
    tokenizer = load_tokenizer(_beside(path, ".tokenizer.json"))
    if tokenizer.vocab_size != header["vocab_size"]:
        raise InputError(
            f"{_beside(path, '.tokenizer.json')} has {tokenizer.vocab_size} tokens, but {path} "
            f"was written with {header['vocab_size']}: restore the files from a copy"
        )
    ends = _read_ends(_beside(path, ".documents.npy"), sum(header["documents"].values()))
    dtype = np.dtype(header["dtype"])
    size = path.stat().st_size if path.exists() else -1
    if size != header["tokens"] * dtype.itemsize or ends[-1, 0] != header["tokens"]:
        raise InputError(
            f"{path} must hold the {header['tokens']:,} {dtype.name} ids that "
            f"{_beside(path, '.json').name} names, "
            + ("and is missing" if size < 0 else f"and has {size:,} bytes")
            + ": restore the files from a copy"
        )
    ids = np.memmap(path, dtype, mode="r")
    digest = _check_ids(ids, header["vocab_size"], path)
    digest.update(ends.tobytes())
    parts: dict[Part, TokenDocuments] = {}
    ends, first = np.concatenate([[[0, 0]], ends]), 0
    for part in PARTS:
        last = first + header["documents"][part]
        parts[part] = TokenDocuments(
            ids=ids,
            starts=ends[first:last, 0],
            ends=ends[first + 1 : last + 1, 0],
            num_bytes=int(ends[last, 1] - ends[first, 1]),
        )
        first = last
    return TokenFile(parts=parts, tokenizer=tokenizer, sha256=digest.hexdigest())


def _encoded(
    documents: Iterable[str], tokenizer: TextTokenizer
) -> Iterator[tuple[np.ndarray, int]]:
    """The ids of each document and the bytes of its text."""
    held: list[str] = []

    def encode() -> Iterator[tuple[np.ndarray, int]]:
        for text, ids in zip(held, tokenizer.encode_batch(held), strict=True):
            yield np.array(ids, np.int64), len(text.encode("utf-8"))
        held.clear()

    for document in documents:
        held.append(document)
        if len(held) == _DOCUMENTS_PER_CALL or len(document) > 100_000:
            yield from encode()
    yield from encode()


def _dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_suffix(suffix)


def _read_header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: a file of tokens is made by jax-transformer tokenize"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it from a copy") from None
    match header:
        case {
            "dtype": "uint16" | "uint32",
            "vocab_size": int(),
            "tokens": int(),
            "documents": {"train": int(train), "valid": int(valid), "test": int(test)},
        } if min(train, valid, test) > 0:
            return header
    raise InputError(
        f"{path}: must hold dtype (uint16 or uint32), vocab_size, tokens, and the documents to "
        f"train, valid and test with: restore it from a copy"
    )


def _read_ends(path: Path, count: int) -> Int[np.ndarray, "N 2"]:
    try:
        ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it from a copy") from None
    if ends.shape != (count, 2) or ends.dtype != np.int64 or (np.diff(ends, axis=0) < 0).any():
        raise InputError(
            f"{path}: must hold the ends of {count} documents, int64 [{count}, 2], in order: "
            f"restore it from a copy"
        )
    return ends


def _check_ids(ids: np.ndarray, vocab_size: int, path: Path) -> Any:
    """Look at every id; returns a hash of all of them."""
    digest = hashlib.sha256()
    for start in range(0, len(ids), _BLOCK):
        block = ids[start : start + _BLOCK]
        if block.max() >= vocab_size:
            place = start + int(np.argmax(block >= vocab_size))
            raise InputError(
                f"{path}: token {place} is {ids[place]}: must be from 0 to {vocab_size - 1}"
            )
        digest.update(block.tobytes())
    return digest
