"""The pickle inside PyTorch's files, read and written without PyTorch and without running code.

A state dict is a pickle of calls of `torch._utils._rebuild_tensor_v2` on storages that lie beside
it (Python's `pickle` protocol 2; `torch/serialization.py`). Only the calls listed here are known,
and what they make is a `LazyTensor`.
"""

import collections
import dataclasses
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.operations import Shape

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
    "ComplexFloatStorage": np.dtype(np.complex64),
    "UntypedStorage": np.dtype(np.uint8),
}
DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
}


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of numbers beside the pickle."""

    dtype: np.dtype
    key: str
    elements: int


@dataclasses.dataclass(frozen=True)
class Untyped:
    """The class of a storage, or a dtype, in the pickle."""

    dtype: np.dtype


class SafeUnpickler(pickle.Unpickler):
    """Reads containers, numbers, text, tensors and NumPy arrays; refuses all else.

    Args:
        file: the pickle.
        path: of the whole, for messages.
        read_storage: storage, first element, strides in elements -> array.
    """

    def __init__(self, file: Any, path: Path, read_storage: Callable[..., np.ndarray]):
        super().__init__(file, encoding="utf-8")
        self.path = path
        self.read_storage = read_storage
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self.tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch", "Size"): tuple,
            ("torch", "device"): lambda *arguments: ":".join(map(str, arguments)),
            ("_codecs", "encode"): encode,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) in known:
            return known[module, name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return Untyped(STORAGES[name])
        if module == "torch" and name in DTYPES:
            return Untyped(DTYPES[name])
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            if name == "_reconstruct":
                return reconstruct
            if name == "scalar":
                return lambda dtype, data: np.frombuffer(data, dtype)[0]
        raise InputError(
            f"{self.path} would call {module}.{name} when it is loaded: only tensors, containers, "
            f"numbers and text are read; save the state_dict() alone"
        )

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, elements = pid[:5]
        # The sixth, of old files only, would make it a part of another storage.
        if kind != "storage" or not isinstance(storage, Untyped) or any(pid[5:]):
            raise pickle.UnpicklingError(f"{pid} is no storage")
        self.storages[key] = Storage(storage.dtype, key, elements)
        return self.storages[key]

    def tensor(
        self, storage: Storage, offset: int, shape: Shape, strides: Shape, *rest: object
    ) -> LazyTensor:
        """What `torch._utils._rebuild_tensor_v2` would make."""
        return self.lazy(storage, storage.dtype, offset, tuple(shape), tuple(strides))

    def tensor_of_dtype(
        self,
        storage: Storage,
        offset: int,
        shape: Shape,
        strides: Shape,
        requires_grad: bool,
        hooks: object,
        dtype: Untyped,
        *rest: object,
    ) -> LazyTensor:
        """What `torch._utils._rebuild_tensor_v3` would make."""
        return self.lazy(storage, dtype.dtype, offset, tuple(shape), tuple(strides))

    def lazy(
        self, storage: Storage, dtype: np.dtype, offset: int, shape: Shape, strides: Shape
    ) -> LazyTensor:
        """A tensor that lies in a storage.

        Raises:
            UnpicklingError: it would reach beyond it.
        """
        if len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise pickle.UnpicklingError(f"a tensor of {shape} with strides {strides}")
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        elements = storage.elements * storage.dtype.itemsize // dtype.itemsize
        if 0 not in shape and last >= elements:
            raise pickle.UnpicklingError(f"a tensor reaches beyond storage {storage.key}")
        return LazyTensor(
            shape, dtype, lambda: self.read_storage(storage, dtype, offset, shape, strides)
        )


def encode(text: str, encoding: str) -> bytes:
    """Bytes, as protocol 2 spells them."""
    return text.encode(encoding)


def reconstruct(kind: type, shape: Shape, dtype: Any) -> np.ndarray:
    """An empty array, whose state comes next in the pickle."""
    return np.ndarray(shape, dtype)


@dataclasses.dataclass(frozen=True)
class TensorReference:
    """A tensor to be written: all of the storage of that key."""

    key: str
    shape: Shape
    dtype: np.dtype


STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def dump(value: Any) -> bytes:
    """A pickle of containers, numbers, text and `TensorReference`, as `torch.save` would write it.

    Raises:
        ValueError: anything else.
    """
    return b"\x80\x02" + encode_value(value) + b"."


def encode_value(value: Any) -> bytes:
    """The opcodes that make `value`."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return encode_integer(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case list():
            return b"](" + b"".join(map(encode_value, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(encode_value, value)) + b"t"
        case dict():
            pairs = b"".join(encode_value(k) + encode_value(v) for k, v in value.items())
            ordered = isinstance(value, collections.OrderedDict)
            return (encode_name("collections", "OrderedDict") + b")R(" if ordered else b"}(") + (
                pairs + b"u"
            )
        case TensorReference():
            return encode_tensor(value)
    raise ValueError(f"{type(value).__name__} cannot be written into a state dict")


def encode_integer(value: int) -> bytes:
    """An integer of any size."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def encode_name(module: str, name: str) -> bytes:
    """A global of a module."""
    return f"c{module}\n{name}\n".encode()


def encode_tensor(tensor: TensorReference) -> bytes:
    """A call that makes a contiguous tensor of a whole storage."""
    elements = int(np.prod(tensor.shape, dtype=np.int64))
    strides = tuple(
        int(np.prod(tensor.shape[axis + 1 :], dtype=np.int64)) for axis in range(len(tensor.shape))
    )
    if tensor.dtype in STORAGE_OF:
        function, kind = "_rebuild_tensor_v2", encode_name("torch", STORAGE_OF[tensor.dtype])
        extra = b""
    elif tensor.dtype in NAME_OF:
        function, kind = "_rebuild_tensor_v3", encode_name("torch.storage", "UntypedStorage")
        elements *= tensor.dtype.itemsize
        extra = encode_name("torch", NAME_OF[tensor.dtype])
    else:
        raise ValueError(f"PyTorch has no dtype {tensor.dtype}")
    storage = b"(" + encode_value("storage") + kind + encode_value(tensor.key) + encode_value("cpu")
    return (
        encode_name("torch._utils", function)
        + b"("
        + (storage + encode_value(elements) + b"tQ")
        + encode_value(0)
        + encode_value(tensor.shape)
        + encode_value(strides)
        + encode_value(False)
        + encode_value(collections.OrderedDict())
        + extra
        + b"tR"
    )
