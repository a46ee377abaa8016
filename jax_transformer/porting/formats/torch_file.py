"""PyTorch's own files (`.pt`, `.pth`, `.bin`): state dicts, read and written without PyTorch.

A zip archive, uncompressed, of a pickle `data.pkl` and a storage `data/KEY` for each tensor; before
PyTorch 1.6 a sequence of pickles, then the storages. See `torch_pickle` for what is read of them.
"""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import (
    Checkpoint,
    LazyTensor,
    Writer,
    check_size,
    flat_bytes,
    map_tensor,
    readable_errors,
)
from jax_transformer.porting.formats.torch_pickle import (
    DTYPES,
    SafeUnpickler,
    Storage,
    TensorReference,
    dump,
)
from jax_transformer.porting.formats.zip_file import StoredZip
from jax_transformer.porting.operations import Shape, contiguous
from jax_transformer.porting.plan import Header

FORMAT = "pt"

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Where in a file a state dict may be, when the file holds more."""

LEGACY_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""How files from before PyTorch 1.6 begin."""


def read(path: Path) -> Checkpoint:
    """The state dict of a file; what else the file holds is the checkpoint's metadata.

    Raises:
        InputError: the file would run code, is damaged, or holds no state dict.
    """
    tensors, rest = find_state_dict(path, load(path))
    return Checkpoint(path=path, format=FORMAT, tensors=tensors, metadata=rest)


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors and the rest: what `safetensors_file.gather` asks of a shard.

    Raises:
        InputError: as `read`.
    """
    return find_state_dict(path, load(path))


def find_state_dict(path: Path, content: Any) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The state dict in what a file holds, and what else there is.

    Raises:
        InputError: there is none, or more than one.
    """
    rest: dict[str, Any] = {}
    while isinstance(content, dict) and not is_state_dict(content):
        found = [name for name in WRAPPERS if isinstance(content.get(name), dict)]
        if len(found) != 1:
            break
        rest |= {str(name): value for name, value in content.items() if name != found[0]}
        content = content[found[0]]
    if not is_state_dict(content):
        kind = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"{path} holds {kind[:200] or 'nothing'}, but no state dict, alone or under one of "
            f"{', '.join(WRAPPERS)}: save model.state_dict()"
        )
    return dict(content), rest


def is_state_dict(content: Any) -> bool:
    """Whether it is names and tensors and nothing else."""
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(name, str) for name in content)
        and all(isinstance(value, LazyTensor) for value in content.values())
    )


def load(path: Path) -> Any:
    """All that a file holds, with lazy tensors: what `torch.load(weights_only=True)` gives.

    Raises:
        InputError: the file would run code, or is damaged.
    """
    try:
        with readable_errors(path), path.open("rb") as file:
            start = file.read(len(LEGACY_MAGIC))
            if start == LEGACY_MAGIC:
                return load_legacy(path, file)
            if start[:4] != b"PK\x03\x04":
                raise InputError(
                    f"{path} is no file of PyTorch: neither a zip archive nor what came before; "
                    f"see what it is, or copy or download it again"
                )
            return load_zip(path)
    except InputError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, struct.error, EOFError) as error:
        raise InputError(f"{path} is cut off or damaged ({error}): copy it again") from None
    except Exception as error:
        # Whatever a pickle that means no good, or bytes that are no pickle, make Python raise.
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: its pickle cannot be read ({reason}): copy it again") from None


class Region(NamedTuple):
    """Where the bytes of a storage are."""

    offset: int
    nbytes: int


def load_zip(path: Path) -> Any:
    """The content of a zip archive.

    Raises:
        InputError: an entry is missing, compressed or of another size.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        entries = {info.filename: info for info in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise InputError(f"{path}: an entry is there twice")
        pickles = [name for name in entries if name.endswith("data.pkl")]
        if len(pickles) != 1:
            raise InputError(f"{path} has {len(pickles)} entries called data.pkl, must be 1")
        prefix = pickles[0].removesuffix("data.pkl")
        order = archive.read(f"{prefix}byteorder") if f"{prefix}byteorder" in entries else b"little"
        if order != b"little":
            raise InputError(f"{path} is in {order.decode()}-endian order: save it on x86 or ARM")
        regions: dict[str, Region] = {}
        unpickler = SafeUnpickler(
            io.BytesIO(archive.read(pickles[0])), path, storage_reader(path, regions)
        )
        content = unpickler.load()
        for storage in unpickler.storages.values():
            info = entries.get(f"{prefix}data/{storage.key}")
            if info is None:
                raise InputError(f"{path} lacks the storage {storage.key}: copy it again")
            needed = storage.elements * storage.dtype.itemsize
            if info.compress_type != zipfile.ZIP_STORED or info.file_size < needed:
                raise InputError(
                    f"{path}: storage {storage.key} has {info.file_size:,} bytes, must be "
                    f"{needed:,}, uncompressed"
                )
            regions[storage.key] = Region(data_offset(file, info), needed)
    return content


def data_offset(file: Any, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an entry start: after its own header, which may be padded."""
    file.seek(info.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no entry at byte {info.header_offset}")
    name, extra = struct.unpack("<HH", header[26:30])
    return info.header_offset + 30 + name + extra


def load_legacy(path: Path, file: Any) -> Any:
    """The content of a file from before PyTorch 1.6: four pickles, the keys, the storages."""
    regions: dict[str, Region] = {}
    reader = storage_reader(path, regions)
    protocol, _ = (SafeUnpickler(file, path, reader).load() for _ in range(2))
    if protocol != 1001:
        raise InputError(f"{path} has the protocol {protocol}, must be 1001")
    unpickler = SafeUnpickler(file, path, reader)
    content = unpickler.load()
    keys = SafeUnpickler(file, path, reader).load()
    offset = file.tell()
    size = file.seek(0, io.SEEK_END)
    for key in keys:
        storage = unpickler.storages[key]
        nbytes = storage.elements * storage.dtype.itemsize
        check_size(path, size, offset + 8 + nbytes)
        file.seek(offset)
        (elements,) = struct.unpack("<q", file.read(8))
        if elements != storage.elements:
            raise InputError(f"{path}: storage {key} has {elements:,} elements: copy it again")
        regions[key] = Region(offset + 8, nbytes)
        offset += 8 + nbytes
    if missing := unpickler.storages.keys() - regions.keys():
        raise InputError(f"{path} lacks the storages {', '.join(sorted(missing))}: copy it again")
    return content


def storage_reader(path: Path, regions: Mapping[str, Region]) -> Any:
    """The reader of tensors that lie in those regions of a file."""

    def read_storage(
        storage: Storage, dtype: np.dtype, offset: int, shape: Shape, strides: Shape
    ) -> np.ndarray:
        if 0 in shape:
            return np.empty(shape, dtype)
        # Only the part that the tensor lies in: many may lie in one storage.
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        start = regions[storage.key].offset + offset * dtype.itemsize
        flat = map_tensor(path, start, Header((last + 1,), dtype))
        steps = [step * dtype.itemsize for step in strides]
        return contiguous(np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False))

    return read_storage


class FileWriter(Writer):
    """A `.pt` file: an `OrderedDict` of the tensors.

    Args:
        path, headers: see `Writer`.
        arrange: makes of the tensors, by name, what the file holds: containers, numbers and text
            around them; by default it holds just these.

    Raises:
        InputError: what `Writer` raises; a dtype that PyTorch has not.
    """

    def __init__(
        self,
        path: Path,
        headers: Mapping[str, Header],
        *,
        arrange: Callable[[Mapping[str, TensorReference]], Any] = lambda tensors: tensors,
    ):
        super().__init__(path, headers)
        unknown = [name for name in headers if headers[name].dtype not in DTYPES.values()]
        if unknown:
            dtype = headers[unknown[0]].dtype
            raise InputError(f"{path}: PyTorch has no dtype {dtype} (of {unknown[0]})")
        state = collections.OrderedDict(
            (name, TensorReference(str(number), header.shape, header.dtype))
            for number, (name, header) in enumerate(headers.items())
        )
        content = dump(arrange(state))
        small = {"data.pkl": content, "byteorder": b"little", "version": b"3\n"}
        sizes = {name: len(data) for name, data in small.items()}
        sizes |= {f"data/{tensor.key}": headers[name].nbytes for name, tensor in state.items()}
        self._small = small
        self._entries = {name: f"data/{tensor.key}" for name, tensor in state.items()}
        self._archive = StoredZip(self.partial, {f"archive/{n}": sizes[n] for n in sizes})

    def open(self) -> None:
        self._archive.open()
        for name, data in self._small.items():
            self._archive.write(f"archive/{name}", memoryview(data))

    def write(self, name: str, array: np.ndarray) -> None:
        self._archive.write(f"archive/{self._entries[name]}", flat_bytes(array))

    def finish(self) -> None:
        self._archive.finish()

    def release(self) -> None:
        self._archive.release()
