"""Text files to sentence pairs, with every fault of a file reported by its place."""

import codecs
import dataclasses
import gzip
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from jax_transformer.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelText:
    """Sentences and their translations: `targets[i]` translates `sources[i]`.

    Neither side of a pair is blank. `skipped` counts the pairs that were left out because one
    side was, so that the caller can say so.

    Raises:
        InputError: the two sides differ in length.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    skipped: int = 0

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.targets):
            raise InputError(
                f"{len(self.sources)} sources but {len(self.targets)} targets: "
                f"each source needs exactly one target"
            )

    def __len__(self) -> int:
        return len(self.sources)


def read_lines(path: str | os.PathLike[str]) -> tuple[str, ...]:
    r"""The lines of a UTF-8 file, surrounding white space stripped, blank ones kept as "".

    A line ends at `\n` or `\r\n` and nowhere else (not at U+2028, form feeds, ...), so that line
    numbers agree with other tools. A name that ends in `.gz` is decompressed, a byte order mark
    at the beginning is left out.

    Raises:
        InputError: the file is missing, a folder, unreadable, empty, or not valid UTF-8 (with
            file, line and byte).
    """
    return tuple(line.strip() for line in _read_raw_lines(Path(path)))


def read_parallel(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> ParallelText:
    """Pairs from two files in which line n of one translates line n of the other.

    Raises:
        InputError: as `read_lines`; the files differ in their number of lines; no pair has text
            on both sides.
    """
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise InputError(
            f"{source} has {len(source_lines)} lines but {target} has {len(target_lines)}: "
            f"line n of one must translate line n of the other"
        )
    pairs = zip(source_lines, target_lines, strict=True)
    return _without_blanks(pairs, place=f"{source} and {target}")


def read_tsv(path: str | os.PathLike[str]) -> ParallelText:
    """Pairs from one file of lines `source<TAB>target`; a blank line is a blank pair.

    Raises:
        InputError: as `read_lines`; a line that does not hold exactly one tab; no pair has text
            on both sides.
    """
    pairs = []
    for number, line in enumerate(_read_raw_lines(Path(path)), start=1):
        columns = line.split("\t") if line.strip() else ["", ""]
        if len(columns) != 2:
            raise InputError(
                f"{path}:{number}: {len(columns) - 1} tabs, where a line must be "
                f"source<TAB>target: keep these two columns only"
            )
        pairs.append((columns[0].strip(), columns[1].strip()))
    return _without_blanks(pairs, place=str(path))


def _without_blanks(pairs: Iterable[tuple[str, str]], *, place: str) -> ParallelText:
    pairs = list(pairs)
    kept = [pair for pair in pairs if all(pair)]
    if not kept:
        raise InputError(f"{place}: no line has text on both sides")
    sources, targets = zip(*kept, strict=True)
    return ParallelText(sources=sources, targets=targets, skipped=len(pairs) - len(kept))


def _read_raw_lines(path: Path) -> list[str]:
    data = _read_bytes(path).removeprefix(codecs.BOM_UTF8)
    if not data:
        raise InputError(f"{path} is empty: it must hold one sentence a line")
    lines = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}:{number}: byte 0x{line[error.start]:02x} (byte {error.start + 1} of the "
                f"line) is not valid UTF-8: save the file as UTF-8"
            ) from None
    return lines


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name a text file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is not a whole gzip file ({error}): compress it anew or drop .gz from its name"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
