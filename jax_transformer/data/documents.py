"""Text for language models: files, folders and JSON lines to documents, every fault by its place.

Documents are read as they are asked for, so that a corpus larger than memory can pass through.
"""

import codecs
import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jax_transformer.errors import InputError

Separator = Literal["none", "blank-line", "endoftext"]
Part = Literal["train", "valid", "test"]

PARTS: tuple[Part, ...] = ("train", "valid", "test")

END_OF_TEXT = "<|endoftext|>"
"""On a line of its own it ends a document, if files are read with that separator."""

FEWEST_TO_HOLD_OUT_WHOLE = 20
"""With fewer documents than this, some text of each is held out and not some documents."""

_TEXT_SUFFIXES = ("", ".txt", ".text", ".md")


@dataclasses.dataclass(frozen=True)
class Documents:
    """Texts that can be read again and again: each iteration reads the files anew."""

    read: Callable[[], Iterator[str]]
    place: str
    """Where they come from, for messages."""

    def __iter__(self) -> Iterator[str]:
        return self.read()


def text_documents(paths: Sequence[Path], separator: Separator = "none") -> Documents:
    """The documents in text files, and in the text files of folders and of folders in them.

    A file is a document; or each stretch of it between blank lines, or between lines
    `<|endoftext|>`. Blank documents are left out. Files are UTF-8, `.gz` ones are decompressed; of
    a folder those are read that end in .txt, .text, .md or have no suffix, `.gz` or not, in the
    order of their names, but for hidden ones.

    Raises:
        InputError: at once, a path that is missing or a folder without text files; while reading,
            a file that cannot be read or is not UTF-8 (with file and line), or no text at all.
    """
    files = [file for path in paths for file in _files(Path(path))]
    place = ", ".join(str(path) for path in paths)

    def read() -> Iterator[str]:
        return _some(
            (document for file in files for document in _documents(file, separator)), place
        )

    return Documents(read, place)


def jsonl_documents(path: Path, field: str) -> Documents:
    """The texts of `field` in a file with a JSON object on each line; blank texts are left out.

    Raises:
        InputError: at once, a missing file; while reading, a line that is not UTF-8, not a JSON
            object, without the field or with another value than text there (with file and line).
    """
    path = Path(path)
    _check_file(path)

    def texts() -> Iterator[str]:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                yield _field(line, field, f"{path}:{number}")

    return Documents(
        lambda: _some((text for text in texts() if text.strip()), str(path)), str(path)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Which text is trained on (`train`), chosen by (`valid`) and quoted (`test`).

    Of 20 documents or more, `share` of them is held out for each of the two, drawn by the seed.
    Of fewer, each is cut: the last `share` of its characters is test, the same before it
    validation. The same documents and seed give the same split with every version of NumPy.
    """

    documents: Documents
    count: int
    share: float
    seed: int

    @classmethod
    def of(cls, documents: Documents, *, share: float, seed: int) -> "Split":
        """The split of `documents`, which are read once to be counted.

        Raises:
            InputError: as they are read; a share that leaves nothing.
        """
        if not 0.0 < share <= 0.25:
            raise InputError(
                f"share={share!r}: the part held out for validation, and as much again for the "
                f"test, must be above 0 and at most 0.25"
            )
        return cls(documents=documents, count=sum(1 for _ in documents), share=share, seed=seed)

    def part(self, name: Part) -> Documents:
        """The documents of that part.

        Raises:
            InputError: while reading, nothing of the text is in the part.
        """
        place = f"the {name} part of {self.documents.place}"
        read = self._whole if self.count >= FEWEST_TO_HOLD_OUT_WHOLE else self._cut
        return Documents(lambda: _some(read(name), place), place)

    def _whole(self, name: Part) -> Iterator[str]:
        # Raw output of PCG64 is the same in all NumPy versions.
        order = np.argsort(np.random.PCG64(self.seed).random_raw(self.count), kind="stable")
        held_out = max(1, round(self.share * self.count))
        part = np.zeros(self.count, np.int8)
        part[order[:held_out]] = PARTS.index("test")
        part[order[held_out : 2 * held_out]] = PARTS.index("valid")
        for index, document in enumerate(self.documents):
            if part[index] == PARTS.index(name):
                yield document

    def _cut(self, name: Part) -> Iterator[str]:
        for document in self.documents:
            held_out = round(self.share * len(document))
            ends = [0, len(document) - 2 * held_out, len(document) - held_out, len(document)]
            place = PARTS.index(name)
            text = document[ends[place] : ends[place + 1]]
            if text.strip():
                yield text


def split_end_of_text(text: str) -> list[str]:
    """The stretches between lines `<|endoftext|>`, without blank ones."""
    return [document for document in _pieces(io.StringIO(text), "endoftext") if document.strip()]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        _check_file(path)
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and (file.with_suffix("") if file.suffix == ".gz" else file).suffix in _TEXT_SUFFIXES
    )
    if not found:
        raise InputError(f"{path} holds no text files (.txt, .text, .md, or these with .gz)")
    return found


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    if not path.exists():
        raise InputError(f"{path}: no such file")


def _documents(path: Path, separator: Separator) -> Iterator[str]:
    return (text for text in _pieces(_lines(path), separator) if text.strip())


def _pieces(lines: Iterable[str], separator: Separator) -> Iterator[str]:
    """Lines put together up to each separator."""
    held: list[str] = []
    for line in lines:
        ends = (separator == "blank-line" and not line.strip()) or (
            separator == "endoftext" and line.strip() == END_OF_TEXT
        )
        if ends:
            yield "".join(held)
            held = []
        else:
            held.append(line)
    yield "".join(held)


def _lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 file with their ends, `\n` alone."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path}:{number}: byte 0x{line[error.start]:02x} (byte "
                        f"{error.start + 1} of the line) is not valid UTF-8: save the file as UTF-8"
                    ) from None
                yield text[:-2] + "\n" if text.endswith("\r\n") else text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is not a whole gzip file ({error}): compress it anew or drop .gz from its name"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _field(line: str, field: str, place: str) -> str:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{place}: not valid JSON ({error}): one object a line is needed"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"{place}: must be a JSON object with the field {field!r}")
    if field not in values:
        known = ", ".join(map(repr, values)) or "none"
        raise InputError(f"{place}: field {field!r} is missing (there are {known}): name another")
    if not isinstance(values[field], str):
        raise InputError(f"{place}: field {field!r} must be text, not {values[field]!r:.40}")
    return values[field]


def _some(documents: Iterator[str], place: str) -> Iterator[str]:
    """The documents, of which there must be one."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise InputError(f"{place}: no text is in it: give more text")
