"""Meta's own Llama checkpoints: `params.json` and `consolidated.NN.pth`, one for each device of
tensor parallelism.

Every shard has every name. How the parts join (`fairscale`'s parallel layers, `llama/model.py`):
what makes activations wider is cut by rows, what makes them narrow again by columns; norms are in
every shard, the same. The embedding is cut by columns up to Llama 2, by rows (tokens) from Llama 3.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import torch_file
from jax_transformer.porting.formats.base import (
    Checkpoint,
    Companion,
    LazyTensor,
    Writer,
    header_of,
    read_json,
    write_json,
)
from jax_transformer.porting.formats.huggingface import copy_companions
from jax_transformer.porting.operations import contiguous
from jax_transformer.porting.plan import Header, bits

FORMAT = "meta"

PARAMS = "params.json"
EMBEDDING = "tok_embeddings.weight"

AXES: dict[str, int | None] = {
    "*.wq.weight": 0,
    "*.wk.weight": 0,
    "*.wv.weight": 0,
    "*.wo.weight": 1,
    "*.w1.weight": 0,
    "*.w2.weight": 1,
    "*.w3.weight": 0,
    "output.weight": 0,
    "*norm.weight": None,
    "rope.freqs": None,
}
"""The axis along which the shards of a tensor join; None: they are all the same."""

COMPANIONS = ("tokenizer.model",)


def read(path: Path) -> Checkpoint:
    """A folder of shards, joined.

    Raises:
        InputError: a shard is missing, or shards that do not fit each other or `params.json`.
    """
    params = read_json(path / PARAMS)
    shards = [torch_file.read_file(file)[0] for file in shard_files(path)]
    names = {name: None for shard in shards for name in shard}
    for number, shard in enumerate(shards):
        if missing := [name for name in names if name not in shard]:
            raise InputError(f"{path}/consolidated.{number:02d}.pth lacks {', '.join(missing[:5])}")
    tensors = {name: join(path, name, [shard[name] for shard in shards], params) for name in names}
    check_width(path, tensors, params, len(shards))
    found = tuple(path / name for name in COMPANIONS if (path / name).is_file())
    return Checkpoint(
        path=path,
        format=FORMAT,
        tensors=tensors,
        config=params,
        metadata={"shards": len(shards)},
        companions=found,
    )


def shard_files(path: Path) -> list[Path]:
    """The shards by number, all there.

    Raises:
        InputError: none, or one is missing between others.
    """
    files = sorted(path.glob("consolidated*.pth"))
    numbers = [re.fullmatch(r"consolidated\.(\d\d)\.pth", file.name) for file in files]
    for expected, (file, number) in enumerate(zip(files, numbers, strict=True)):
        if number is None or int(number[1]) != expected:
            wanted = f"consolidated.{expected:02d}.pth"
            raise InputError(f"{path} has {file.name} where {wanted} must be: copy all the shards")
    if not files:
        raise InputError(f"{path} has no consolidated.00.pth: copy all the shards")
    return files


def axis_of(name: str, dim: int | None, width: int, path: Path) -> int | None:
    """The axis along which the shards of a tensor join.

    Args:
        name: of the tensor.
        dim: the width of the model.
        width: the columns of a shard of it: of the embedding that says along which axis it is cut.
        path: for the message.

    Raises:
        InputError: a name that is not one of Meta's.
    """
    if name == EMBEDDING:
        return 0 if width == dim else 1
    for pattern, axis in AXES.items():
        if fnmatch.fnmatchcase(name, pattern):
            return axis
    raise InputError(f"{path}: how the shards of {name} join is not known: it is no name of Llama")


def join(
    path: Path, name: str, parts: Sequence[LazyTensor], params: Mapping[str, Any]
) -> LazyTensor:
    """The whole tensor of its parts.

    Raises:
        InputError: parts that do not fit each other; for those that must be the same and are not,
            when they are read.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(header_of(part) != header_of(first) for part in parts):
        found = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
        raise InputError(f"{path}: the shards of {name} are {found}, must be the same")
    width = first.shape[-1] if first.shape else 1
    axis = axis_of(name, params.get("dim"), width, path)

    def load() -> np.ndarray:
        arrays = [part.read() for part in parts]
        if axis is not None:
            return np.concatenate(arrays, axis=axis)
        for number, array in enumerate(arrays[1:], 1):
            if not np.array_equal(bits(array), bits(arrays[0])):
                raise InputError(
                    f"{path}: {name} of shard {number} differs from that of shard 0, but must be "
                    f"the same: the shards are of different checkpoints"
                )
        return arrays[0]

    if axis is None:
        return LazyTensor(first.shape, first.dtype, load)
    size = first.shape[axis] * len(parts)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    return LazyTensor(shape, first.dtype, load)


def check_width(
    path: Path, tensors: Mapping[str, LazyTensor], params: Mapping[str, Any], count: int
) -> None:
    """All shards together make matrices of the width that `params.json` says.

    Raises:
        InputError: they do not: the last shards are missing.
    """
    dim = params.get("dim")
    for name, tensor in tensors.items():
        if name.endswith(".wo.weight") and tensor.shape != (dim, dim):
            raise InputError(
                f"{path}: {name} of {count} shards is {list(tensor.shape)}, but {PARAMS} says dim "
                f"{dim}: copy all the shards"
            )


class FolderWriter(Writer):
    """`params.json` and shards.

    Args:
        path, headers: see `Writer`.
        config: the content of `params.json`.
        companions: files to copy beside it.
        shards: into how many.
        embedding_axis: along which the embedding is cut: 0 from Llama 3 on, 1 before.

    Raises:
        InputError: what `Writer` raises; a tensor that cannot be cut into so many parts.
    """

    def __init__(
        self,
        path: Path,
        headers: Mapping[str, Header],
        *,
        config: Mapping[str, Any],
        companions: Sequence[Companion] = (),
        shards: int = 1,
        embedding_axis: int = 0,
    ):
        super().__init__(path, headers)
        self._config = config
        self._companions = companions
        self._count = shards
        self._axes = {
            name: embedding_axis if name == EMBEDDING else axis_of(name, None, 0, path)
            for name in headers
        }
        self._parts = {name: self.part(name, header) for name, header in headers.items()}
        self._shards: list[torch_file.FileWriter] = []

    def part(self, name: str, header: Header) -> Header:
        """The header of a part of a tensor."""
        axis = self._axes[name]
        if axis is None:
            return header
        if header.shape[axis] % self._count:
            raise InputError(
                f"{self.path}: {name} {list(header.shape)} cannot be cut into {self._count} equal "
                f"shards along axis {axis}"
            )
        size = header.shape[axis] // self._count
        return Header((*header.shape[:axis], size, *header.shape[axis + 1 :]), header.dtype)

    def open(self) -> None:
        self.partial.mkdir()
        for number in range(self._count):
            file = self.partial / f"consolidated.{number:02d}.pth"
            self._shards.append(torch_file.FileWriter(file, self._parts))
            self._shards[-1].__enter__()

    def write(self, name: str, array: np.ndarray) -> None:
        axis = self._axes[name]
        for number, shard in enumerate(self._shards):
            if axis is None:
                shard.add(name, array)
            else:
                size = self._parts[name].shape[axis]
                rows = slice(number * size, (number + 1) * size)
                shard.add(name, contiguous(array[(slice(None),) * axis + (rows,)]))

    def finish(self) -> None:
        for shard in self._shards:
            shard.__exit__(None)
        write_json(self.partial / PARAMS, self._config)
        copy_companions(self._companions, self.partial)

    def release(self) -> None:
        for shard in self._shards:
            shard.release()
