"""What every file format offers: names and lazy tensors to read, a stream of tensors to write."""

import contextlib
import dataclasses
import errno
import io
import json
import math
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import Shape, contiguous
from jax_transformer.porting.plan import Header

MANIFEST = "manifest.json"
"""What was ported from where, how, and to which bits."""

CHUNK = 1 << 24
"""Bytes that are written at once."""

SYNC = 1 << 26
"""Bytes that are put onto the disk at once."""


Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file: its header is known, its numbers are read when asked for."""

    shape: Shape
    dtype: np.dtype
    load: Callable[[], np.ndarray] = dataclasses.field(repr=False)
    stored: str = ""
    """How the file holds it, if not as `dtype`: the name of a quantised type, say."""
    load_part: Callable[[Index], np.ndarray] | None = dataclasses.field(default=None, repr=False)
    """Reads a part of it alone, where the format has a way."""

    def read(self) -> np.ndarray:
        """The numbers; where they can be, mapped from the file and not to be written to.

        Raises:
            InputError: the file cannot be read any more.
        """
        return self.load()

    def read_part(self, index: Index) -> np.ndarray:
        """Its numbers there, a slice for each axis.

        Raises:
            InputError: the file cannot be read any more.
        """
        return self.load()[index] if self.load_part is None else self.load_part(index)

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers once read."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Made:
    """A file that belongs to a model but is not there as one: it is made when it is asked for."""

    name: str
    make: Callable[[], str] = dataclasses.field(repr=False)
    origin: Path
    """What it is made of."""

    def __str__(self) -> str:
        return f"{self.name} of {self.origin}"

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content."""
        return self.make()

    def read_bytes(self) -> bytes:
        """The content, as it would be in the file."""
        return self.make().encode()


Companion = Path | Made
"""A file beside the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a file or folder holds.

    Attributes:
        path: where it is.
        format: the name of its format.
        tensors: by the names in the file.
        config: `config.json`, `params.json`, or the metadata of a file that describes itself.
        metadata: what else the file says about itself.
        companions: files beside the weights that belong to the model (tokenizer, generation).
    """

    path: Path
    format: str
    tensors: Mapping[str, LazyTensor]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    companions: tuple[Companion, ...] = ()


class Writer(ABC):
    """Tensors one by one into a place that appears when all are there.

    Everything is written beside the final name and renamed at the end of the `with` block; after an
    error nothing is left.

    Args:
        path: the file or folder to make.
        headers: every tensor that will be added, in that order.

    Raises:
        InputError: `path` is there already or cannot be made, the disk is full.
    """

    def __init__(self, path: Path, headers: Mapping[str, Header]):
        self.path = path
        self.headers = dict(headers)
        self.manifest: Mapping[str, Any] | None = None
        self._left: Iterator[str] = iter(self.headers)
        if path.exists() or path.is_symlink():
            raise InputError(f"{path} is there already: choose another name")
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path}: the directory {path.absolute().parent} is not there")
        wanted = sum(header.nbytes for header in self.headers.values())
        free = shutil.disk_usage(path.absolute().parent).free
        if wanted > free:
            raise InputError(f"{path} needs {wanted:,} bytes, but its disk has {free:,} left")
        self.partial = path.with_name(f".{path.name}.{os.getpid()}.partial")

    def add(self, name: str, array: np.ndarray) -> None:
        """Write the next tensor.

        Raises:
            InputError: the disk is full or cannot be written to.
            ValueError: not the tensor that `headers` has next.
        """
        if name != next(self._left, None) or header_of(array) != self.headers[name]:
            raise ValueError(f"{name} {header_of(array)} does not follow")
        with readable_errors(self.path, "written"):
            self.write(name, contiguous(array))

    @abstractmethod
    def open(self) -> None:
        """Begin in `partial`."""

    @abstractmethod
    def write(self, name: str, array: np.ndarray) -> None:
        """Write one tensor, contiguous and as its header says."""

    @abstractmethod
    def finish(self) -> None:
        """Complete what is in `partial`, on the disk."""

    @abstractmethod
    def release(self) -> None:
        """Close what is open, complete or not."""

    def __enter__(self) -> Self:
        try:
            with readable_errors(self.path, "written"):
                self.open()
        except BaseException:
            self.release()
            remove(self.partial)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                if (missing := next(self._left, None)) is not None:
                    raise ValueError(f"{missing} has not been added")
                with readable_errors(self.path, "written"):
                    self.finish()
                    self.release()
                    self.save_manifest()
                    if self.path.exists():
                        raise InputError(f"{self.path} has appeared meanwhile: nothing is written")
                    self.partial.rename(self.path)
                    sync_directory(self.path.absolute().parent)
        finally:
            self.release()
            remove(self.partial)

    def save_manifest(self) -> None:
        """Write what `manifest` says, if anything: into a folder, or beside a file."""
        if self.manifest is None:
            return
        if self.partial.is_dir():
            write_json(self.partial / MANIFEST, self.manifest)
            return
        beside = self.path.with_name(f"{self.path.name}.{MANIFEST}")
        partial = self.partial.with_name(f"{self.partial.name}.{MANIFEST}")
        try:
            write_json(partial, self.manifest)
            partial.rename(beside)
        finally:
            remove(partial)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, on the disk."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_file(path)


def read_json(path: Companion) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InputError: there is none, or it is something else.
    """
    with readable_errors(path):
        text = path.read_bytes()
    try:
        content = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): restore it from a copy") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object")
    return content


def header_of(array: Any) -> Header:
    """The header of anything that has a shape and a dtype."""
    return Header(tuple(array.shape), np.dtype(array.dtype))


@contextlib.contextmanager
def readable_errors(path: Companion, verb: str = "read") -> Generator[None]:
    """What the operating system refuses, in one line with the file.

    Raises:
        InputError: instead of any `OSError`.
    """
    try:
        yield
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else path
        remedy = ": free some space" if error.errno == errno.ENOSPC else ""
        raise InputError(f"{place} cannot be {verb} ({error.strerror or error}){remedy}") from error


def map_tensor(path: Path, offset: int, header: Header) -> np.ndarray:
    """The tensor at `offset` of a file, mapped into memory for as long as the array lives.

    Raises:
        InputError: the file is too short, or cannot be read.
    """
    if header.nbytes == 0:
        return np.empty(header.shape, header.dtype)
    with readable_errors(path), path.open("rb") as file:
        # A page beyond the end of a mapped file kills the process when it is read.
        check_size(path, os.fstat(file.fileno()).st_size, offset + header.nbytes)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset - start + header.nbytes
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
    flat = np.frombuffer(mapped, np.uint8, header.nbytes, offset - start)
    return flat.view(header.dtype).reshape(header.shape)


def check_size(path: Path, size: int, needed: int) -> None:
    """A file must be as long as its header says.

    Raises:
        InputError: it is shorter.
    """
    if size < needed:
        raise InputError(
            f"{path} is cut off: it has {size:,} bytes, but its header speaks of {needed:,}; copy "
            f"or download it again"
        )


def flat_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Bytes, a part at a time, without a copy."""
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def write_all(file: io.FileIO, data: memoryview) -> None:
    """All bytes, in as many writes as the operating system wants."""
    for chunk in chunks(data):
        while chunk:
            chunk = chunk[file.write(chunk) :]


class OutputFile:
    """A new file, written at any places; what is written goes onto the disk meanwhile, since a
    disk that has been idle until the end takes as long again."""

    def __init__(self, path: Path):
        self._file = io.FileIO(path, "xb")
        self._pool = ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self._waiting = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Bytes from `offset` on.

        Raises:
            OSError: the disk is full or fails, now or with what was written before.
        """
        self._file.seek(offset)
        write_all(self._file, memoryview(data))
        self._waiting += len(data)
        if self._waiting >= SYNC and (self._sync is None or self._sync.done()):
            if self._sync is not None:
                self._sync.result()
            self._sync = self._pool.submit(os.fsync, self._file.fileno())
            self._waiting = 0

    def finish(self) -> None:
        """All of it on the disk.

        Raises:
            OSError: the disk is full or fails.
        """
        if self._sync is not None:
            self._sync.result()
        os.fsync(self._file)

    def close(self) -> None:
        """Nothing more is written."""
        self._pool.shutdown()
        self._file.close()


def sync_directory(path: Path) -> None:
    """Put the names in a directory onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Put a file onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Whatever is there, if anything is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, each of whose names must be there once.

    Raises:
        ValueError: one is there twice.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} is there twice")
        values[name] = value
    return values
