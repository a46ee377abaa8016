"""safetensors: a JSON header, then the bytes of every tensor. One file, or shards with an index.

The layout: 8 bytes with the length of the header (little-endian), the header
`{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}`, the data without gaps.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import (
    Checkpoint,
    LazyTensor,
    OutputFile,
    Writer,
    check_size,
    flat_bytes,
    map_tensor,
    readable_errors,
    unique,
)
from jax_transformer.porting.plan import Header

FORMAT = "safetensors"

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read(path: Path) -> Checkpoint:
    """A file, or the index of shards.

    Raises:
        InputError: anything that is not exactly as the format has it.
    """
    if path.suffix == ".json":
        tensors, metadata = read_shards(path)
    else:
        tensors, metadata = read_file(path)
    return Checkpoint(path=path, format=FORMAT, tensors=tensors, metadata=metadata)


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The tensors and the metadata of one file.

    Raises:
        InputError: the file is cut off, or its header does not describe it.
    """
    with readable_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, 8)
        length = int.from_bytes(file.read(8), "little")
        check_size(path, size, 8 + length)
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique)
        metadata = header.pop("__metadata__", {})
        entries = {name: parse_entry(entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: its header is not one of safetensors ({error})") from None
    # Every byte belongs to one tensor: no gap, no overlap, nothing after the last.
    end = 0
    for name, (entry, start) in sorted(entries.items(), key=lambda item: item[1][1]):
        if start != end and entry.nbytes:
            raise InputError(f"{path}: {name} starts at byte {start}, but must start at {end}")
        end += entry.nbytes
    check_size(path, size, 8 + length + end)
    if size > 8 + length + end:
        raise InputError(
            f"{path} has {size:,} bytes, but its header speaks of {8 + length + end:,} only"
        )
    return {
        name: lazy(path, 8 + length + start, entry) for name, (entry, start) in entries.items()
    }, metadata


def parse_entry(entry: Mapping[str, Any]) -> tuple[Header, int]:
    """Header and offset of one tensor.

    Raises:
        ValueError: the entry contradicts itself.
    """
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {entry['dtype']!r} is not among {', '.join(DTYPES)}")
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(value) is int and value >= 0 for value in (*shape, start, end)):
        raise ValueError(f"{entry} has a number that is not one")
    header = Header(shape, DTYPES[entry["dtype"]])
    if math.prod(shape) * header.dtype.itemsize != end - start:
        raise ValueError(f"{entry['dtype']} {list(shape)} does not take {end - start} bytes")
    return header, start


def lazy(path: Path, offset: int, header: Header) -> LazyTensor:
    """The tensor at `offset`."""
    return LazyTensor(header.shape, header.dtype, lambda: map_tensor(path, offset, header))


def read_shards(index: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """All tensors of the files that an index names.

    Raises:
        InputError: a file is missing, or the index and the files disagree.
    """
    locations, metadata = read_index(index)
    return gather(index, locations, read_file), metadata


def read_index(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Name -> file of each tensor, and the index's metadata.

    Raises:
        InputError: not an index.
    """
    try:
        with readable_errors(index):
            content = json.loads(index.read_bytes(), object_pairs_hook=unique)
        locations = dict(content["weight_map"])
        if not all(isinstance(file, str) and "/" not in file for file in locations.values()):
            raise ValueError("files must be names in the same folder")
    except InputError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{index} is not the index of a sharded checkpoint ({error!r})") from None
    return locations, content.get("metadata") or {}


def gather(index: Path, locations: Mapping[str, str], read_one: Any) -> dict[str, LazyTensor]:
    """The tensors of all shards, each in the one file that the index says.

    Raises:
        InputError: a file is missing, or the index and the files disagree.
    """
    files = sorted(set(locations.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise InputError(f"{index} names {', '.join(missing)}: not there, copy or download it")
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        found, _ = read_one(index.parent / file)
        wanted = {name for name, place in locations.items() if place == file}
        problems = [f"{file} lacks {name}" for name in sorted(wanted - found.keys())]
        problems += [
            f"{file} has {name}, which must be in {locations.get(name, 'no file')}"
            for name in sorted(found.keys() - wanted)
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise InputError(
                f"{index} does not fit its files: {'; '.join(problems[:5])}{more}; the index is of "
                f"another checkpoint"
            )
        tensors |= found
    return tensors


class FileWriter(Writer):
    """One safetensors file.

    Args:
        path, headers: see `Writer`.
        metadata: text by name; "format" tells `transformers` which framework's layout it is.

    Raises:
        InputError: what `Writer` raises; a dtype that the format has not.
    """

    def __init__(
        self,
        path: Path,
        headers: Mapping[str, Header],
        *,
        metadata: Mapping[str, str] | None = None,
    ):
        super().__init__(path, headers)
        self._start, self._offsets = lay_out(path, self.headers, metadata or {"format": "pt"})
        self._file: OutputFile | None = None

    def open(self) -> None:
        self._file = OutputFile(self.partial)

    def write(self, name: str, array: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(self._offsets[name], flat_bytes(array))

    def finish(self) -> None:
        # The header last: without it nobody takes the file for one.
        assert self._file is not None
        self._file.write(0, self._start)
        self._file.finish()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()


def lay_out(
    path: Path, headers: Mapping[str, Header], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The header's bytes, and where in the file each tensor starts.

    Wider dtypes come first, so that every tensor is aligned.

    Raises:
        InputError: a dtype that the format has not.
    """
    unknown = [name for name in headers if headers[name].dtype not in NAMES]
    if unknown:
        dtype = headers[unknown[0]].dtype
        raise InputError(f"{path}: safetensors has no dtype {dtype} (of {unknown[0]})")
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(headers, key=lambda name: -headers[name].dtype.itemsize):
        offsets[name] = end
        end += headers[name].nbytes
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, header in headers.items():
        entries[name] = {
            "dtype": NAMES[header.dtype],
            "shape": list(header.shape),
            "data_offsets": [offsets[name], offsets[name] + header.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + o for n, o in offsets.items()}
