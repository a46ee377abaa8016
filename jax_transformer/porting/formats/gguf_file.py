"""GGUF, the format of llama.cpp: metadata, tensor headers, data; read only.

Quantised tensors are dequantised to float32 with the `gguf` package (extra `port`). Names and row
orders are those of the file: the family knows them.

The layout (docs/gguf.md of ggml): magic, version, counts, metadata as typed key-value pairs, tensor
headers with dimensions from the fastest, data aligned to `general.alignment`.
"""

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import gguf_tokenizer
from jax_transformer.porting.formats.base import (
    Checkpoint,
    LazyTensor,
    check_size,
    map_tensor,
    readable_errors,
)
from jax_transformer.porting.operations import Shape
from jax_transformer.porting.plan import Header

FORMAT = "gguf"
MAGIC = b"GGUF"

PLAIN = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    24: np.dtype(np.int8),
    25: np.dtype(np.int16),
    26: np.dtype(np.int32),
    27: np.dtype(np.int64),
    28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}
"""Types of tensors that are stored as they are."""

BLOCKS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
"""Quantised types: name, elements and bytes of a block."""

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Types of metadata that `struct` knows."""
STRING, ARRAY = 8, 9

NO_TOKENIZER = "no tokenizer"
"""Why, in the metadata of a checkpoint."""

ROWS = 1 << 22
"""Elements that are dequantised at once."""


def read(path: Path) -> Checkpoint:
    """A file.

    Raises:
        InputError: the file is damaged, or has a type of tensor that is not known.
    """
    with readable_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            metadata, entries, start = read_header(path, file, size)
        except (struct.error, UnicodeDecodeError, KeyError, RecursionError) as error:
            raise InputError(f"{path} is cut off or damaged ({error!r}): copy it again") from None
    tensors: dict[str, LazyTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise InputError(f"{path}: {name} is there twice")
        tensors[name] = lazy(path, name, shape, kind, start + offset, size)
    reason = gguf_tokenizer.problem(metadata)
    return Checkpoint(
        path=path,
        format=FORMAT,
        tensors=tensors,
        config=metadata,
        metadata={} if reason is None else {NO_TOKENIZER: reason},
        companions=gguf_tokenizer.companions(path, metadata),
    )


def read_header(
    path: Path, file: BinaryIO, size: int
) -> tuple[dict[str, Any], list[tuple[str, Shape, int, int]], int]:
    """Metadata, (name, shape, type, offset) of each tensor, where the data start.

    Raises:
        InputError: another version or byte order.
        struct.error: the file is too short.
    """
    if file.read(4) != MAGIC:
        raise InputError(f"{path} is no GGUF file")
    (version,) = unpack(file, "I")
    if version not in (2, 3):
        raise InputError(f"{path} has GGUF version {version}, must be 2 or 3, little-endian")
    count, pairs = unpack(file, "QQ")
    if count + pairs > size:
        raise InputError(f"{path} is damaged: {count} tensors in {size} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = read_string(file, size)
        metadata[key] = read_value(file, size, *unpack(file, "I"))
    entries = []
    for _ in range(count):
        name = read_string(file, size)
        (axes,) = unpack(file, "I")
        if axes > 8:
            raise InputError(f"{path} is damaged: {name} has {axes} axes")
        # The file counts dimensions from the fastest.
        shape = unpack(file, "Q" * axes)[::-1]
        entries.append((name, shape, *unpack(file, "IQ")))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0:
        raise InputError(f"{path} has general.alignment {alignment}")
    return metadata, entries, file.tell() + -file.tell() % alignment


def unpack(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    """Little-endian values.

    Raises:
        struct.error: the file is too short.
    """
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def read_string(file: BinaryIO, size: int) -> str:
    """A length and text.

    Raises:
        struct.error: the file is too short.
    """
    (length,) = unpack(file, "Q")
    text = file.read(min(length, size))
    if len(text) != length:
        raise struct.error(f"text of {length} bytes is cut off")
    return text.decode()


def read_value(file: BinaryIO, size: int, kind: int) -> Any:
    """A value of metadata; arrays as lists.

    Raises:
        struct.error: the file is too short.
        KeyError: no such type.
    """
    if kind == STRING:
        return read_string(file, size)
    if kind != ARRAY:
        return unpack(file, SCALARS[kind])[0]
    inner, count = unpack(file, "IQ")
    if count > size:
        raise struct.error(f"an array of {count} values is cut off")
    if inner in SCALARS:
        return list(unpack(file, f"{count}{SCALARS[inner]}"))
    return [read_value(file, size, inner) for _ in range(count)]


def lazy(path: Path, name: str, shape: Shape, kind: int, offset: int, size: int) -> LazyTensor:
    """The tensor at `offset`.

    Raises:
        InputError: its type is not known, or the file is too short for it.
    """
    if kind in PLAIN:
        header = Header(shape, PLAIN[kind])
        check_size(path, size, offset + header.nbytes)
        return LazyTensor(shape, header.dtype, lambda: map_tensor(path, offset, header))
    if kind not in BLOCKS:
        known = ", ".join(block for block, _, _ in BLOCKS.values())
        raise InputError(f"{path}: {name} has the type number {kind}, known are floats, {known}")
    stored, elements, nbytes = BLOCKS[kind]
    if not shape or shape[-1] % elements:
        raise InputError(f"{path}: {name} {list(shape)} is not of {stored} blocks of {elements}")
    rows = Header((math.prod(shape[:-1]), shape[-1] // elements * nbytes), np.dtype(np.uint8))
    check_size(path, size, offset + rows.nbytes)
    dequantize = dequantizer(path, kind)

    def load() -> np.ndarray:
        data = map_tensor(path, offset, rows)
        result = np.empty((len(data), shape[-1]), np.float32)
        step = max(1, ROWS // max(1, shape[-1]))
        for first in range(0, len(data), step):
            result[first : first + step] = dequantize(data[first : first + step])
        return result.reshape(shape)

    return LazyTensor(shape, np.dtype(np.float32), load, stored)


def dequantizer(path: Path, kind: int) -> Callable[[np.ndarray], np.ndarray]:
    """Blocks of bytes -> float32.

    Raises:
        InputError: the `gguf` package is not installed.
    """
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise InputError(
            f"{path} has quantised tensors: install what reads them, "
            f"pip install 'jax-transformer[port]'"
        ) from None
    return lambda data: dequantize(data, GGMLQuantizationType(kind))
