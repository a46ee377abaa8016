"""The project's own directories: runs of `train.py`, and ported models, which look like a run of
which only the best model is left.

config.json              settings; the model under "model"
tokenizer.json           and other files that belong to it
source/config.json       of a ported model: as it was where it came from
checkpoints/best/STEP/   {"params": ..., "buffers": ...}, written by orbax
checkpoints/latest/STEP/ of a run that trains: the same among the rest of its state

Tensors are read and written one by one through tensorstore, which orbax is made of (its layout: a
zarr array for each leaf, in one OCDBT store).
"""

import collections
import contextlib
import errno
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import (
    SYNC,
    Checkpoint,
    Companion,
    LazyTensor,
    Writer,
    read_json,
    sync_directory,
    sync_file,
    write_json,
)
from jax_transformer.porting.formats.huggingface import companions, copy_companions
from jax_transformer.porting.operations import Shape
from jax_transformer.porting.plan import Header

FORMAT = "orbax"

CONFIG = "config.json"
SOURCE = "source"
BEST = Path("checkpoints", "best")
LATEST = Path("checkpoints", "latest")
PARTS = ("params", "buffers")

OS_ERROR = re.compile(r"([^:]+) \[os_error_code='(\d+)'\]")
"""What the operating system refuses, at the end of tensorstore's messages."""

BLOCK = 1 << 23
"""Bytes of a chunk of an array: what is encoded at once."""
UNDER_WAY = 3
"""How many chunks are."""


def read(path: Path, *, latest: bool = False) -> Checkpoint:
    """The best model of a run or of a ported directory; the latest of a run that has no best yet.

    Args:
        path: of the directory.
        latest: prefer what training goes on from to the best model.

    Raises:
        InputError: no complete checkpoint, or one that cannot be read.
    """
    config = read_json(path / CONFIG)
    best, newest = best_step(path / BEST), latest_step(path / LATEST)
    step = (newest or best) if latest else (best or newest)
    if step is None:
        raise InputError(f"{path} holds no complete checkpoint under {BEST} or {LATEST}")
    tensors: dict[str, LazyTensor] = {}
    rest: dict[str, LazyTensor] = {}
    for (part, *names), tensor in leaves(step / "default"):
        name = ".".join(names)
        if part not in PARTS:
            rest[".".join((part, *names))] = tensor
        elif name in tensors:
            raise InputError(f"{step}: {name} is both a parameter and a buffer")
        else:
            tensors[name] = tensor
    return Checkpoint(
        path=path,
        format=FORMAT,
        tensors=tensors,
        config=config,
        metadata={"step": step.name, "rest": rest},
        companions=companions(path),
    )


def steps(path: Path) -> list[Path]:
    """The complete checkpoints in a directory, by number: orbax renames them when they are."""
    if not path.is_dir():
        return []
    return sorted((p for p in path.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))


def latest_step(path: Path) -> Path | None:
    """The newest checkpoint."""
    return max(steps(path), key=lambda step: int(step.name), default=None)


def best_step(path: Path) -> Path | None:
    """The checkpoint with the highest score, the newer of two with the same."""

    def score(step: Path) -> tuple[float, int]:
        return read_json(step / "metrics" / "metrics").get("score", 0.0), int(step.name)

    return max(steps(path), key=score, default=None)


def leaves(path: Path) -> Iterator[tuple[tuple[str, ...], LazyTensor]]:
    """Path and tensor of each leaf of an orbax checkpoint.

    Raises:
        InputError: it is damaged, or in a layout that is not known.
    """
    layout = read_json(path / "_METADATA")
    if not layout.get("use_ocdbt") or layout.get("use_zarr3"):
        raise InputError(f"{path} is not in the layout that train.py writes: OCDBT and zarr 2")
    for entry in layout["tree_metadata"].values():
        if not entry["value_metadata"]["skip_deserialize"]:
            keys = tuple(str(key["key"]) for key in entry["key_metadata"])
            yield keys, lazy(path, ".".join(keys))


def lazy(path: Path, name: str) -> LazyTensor:
    """The array of that name.

    Raises:
        InputError: it is not there.
    """
    store = open_array(path, name, {"open": True})
    return LazyTensor(
        tuple(store.shape),
        np.dtype(store.dtype.numpy_dtype),
        lambda: np.asarray(finished(path, store.read())),
        load_part=lambda index: np.asarray(finished(path, store[index].read())),
    )


def open_array(path: Path, name: str, options: Mapping[str, Any]) -> Any:
    """A zarr array of the store at `path`.

    Raises:
        InputError: it cannot be opened or made.
    """
    store = {"driver": "ocdbt", "base": f"file://{path.absolute()}/"}
    spec = {"driver": "zarr", "kvstore": store, "path": name, "recheck_cached_data": "open"}
    # The writer puts all files onto the disk at the end: chunk by chunk takes four times as long.
    context = ts.Context({"file_io_sync": False})
    return finished(path, ts.open({**spec, **options}, context=context))


def finished(path: Path, future: Any) -> Any:
    """What tensorstore gives in the end.

    Raises:
        InputError: whatever goes wrong in it: the disk is full, files are missing or damaged.
    """
    try:
        return future.result()
    except (ValueError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        refused = OS_ERROR.search(text)
        reason = refused[1].strip() if refused else text[:300]
        full = refused is not None and int(refused[2]) == errno.ENOSPC
        remedy = ": free some space" if full else ""
        place = f"{path}: tensors cannot be read or written here"
        raise InputError(f"{place} ({reason}){remedy}") from None


class FolderWriter(Writer):
    """A ported directory.

    Args:
        path, headers: see `Writer`.
        config: the content of `config.json`, the model under "model".
        companions: files to copy beside it.
        buffers: the tensors that are buffers; all others are parameters.
        originals: files that are kept in a folder of their own: the config of the source.
        state: of a run to be resumed: the number of updates made, and the tree of its newest
            checkpoint, in which the names of `headers` stand for tensors. By default what is
            written is the best model.
        files: further files: name -> text.
        parts: in how many parts each axis of each tensor is split over devices, which read their
            own alone; by default in one.

    Raises:
        InputError: what `Writer` raises.
    """

    def __init__(
        self,
        path: Path,
        headers: Mapping[str, Header],
        *,
        config: Mapping[str, Any],
        companions: Sequence[Companion] = (),
        buffers: Sequence[str] = (),
        originals: Sequence[Path] = (),
        state: tuple[int, Any] | None = None,
        files: Mapping[str, str] | None = None,
        parts: Mapping[str, Shape] | None = None,
    ):
        super().__init__(path, headers)
        self._config = config
        self._companions = companions
        self._originals = originals
        self._files = files or {}
        self._parts = parts or {}
        self._place = BEST if state is None else LATEST
        self._step, self._tree = (0, best_tree(headers, buffers)) if state is None else state
        self._places = {name: place for place, name in named_leaves(self._tree)}
        self._arrays = self.partial / self._place / str(self._step) / "default"
        self._pool = ThreadPoolExecutor(1)
        self._sync: Future[None] | None = None
        self._synced: set[Path] = set()
        self._waiting = 0

    def open(self) -> None:
        # Orbax writes what its version wants around the arrays; the arrays follow one by one.
        tree = jax.tree.map(
            lambda leaf: np.zeros((), np.int8) if isinstance(leaf, str) else leaf, self._tree
        )
        logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
        scored = self._place == BEST
        options = ocp.CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=False,
            best_fn=(lambda metrics: metrics["score"]) if scored else None,
        )
        handler = ocp.StandardCheckpointHandler()
        folder = (self.partial / self._place).absolute()
        metrics = {"score": 0.0} if scored else None
        try:
            with ocp.CheckpointManager(folder, options=options, item_handlers=handler) as manager:
                manager.save(self._step, args=ocp.args.StandardSave(tree), metrics=metrics)
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{self.path} cannot be written ({reason})") from error

    def write(self, name: str, array: np.ndarray) -> None:
        chunks = chunk_shape(array, self._parts.get(name, (1,) * array.ndim))
        layout = {
            "shape": array.shape,
            "dtype": zarr_dtype(array.dtype),
            "chunks": chunks,
            "compressor": None,
        }
        store = open_array(
            self._arrays,
            self._places[name],
            {
                "create": True,
                "delete_existing": True,
                "store_data_equal_to_fill_value": True,
                "metadata": layout,
            },
        )
        if array.ndim == 0:
            finished(self._arrays, store.write(array))
            return
        writing: collections.deque[Any] = collections.deque()
        for first in range(0, len(array), chunks[0]):
            last = min(first + chunks[0], len(array))
            writing.append(store[first:last].write(array[first:last]))
            if len(writing) == UNDER_WAY:
                finished(self._arrays, writing.popleft())
        for chunk in writing:
            finished(self._arrays, chunk)
        self._waiting += array.nbytes
        if self._waiting >= SYNC and (self._sync is None or self._sync.done()):
            self._sync = self._pool.submit(self.sync)
            self._waiting = 0

    def sync(self) -> None:
        """Put the files of the arrays that are there onto the disk, each of them once."""
        for path in self._arrays.rglob("d/*"):
            # Files under way are renamed when they are complete.
            with contextlib.suppress(FileNotFoundError):
                if path not in self._synced and path.is_file():
                    sync_file(path)
                    self._synced.add(path)

    def finish(self) -> None:
        write_json(self.partial / CONFIG, self._config)
        for name, text in self._files.items():
            (self.partial / name).write_text(text, encoding="utf-8")
        copy_companions(self._companions, self.partial)
        if self._originals:
            (self.partial / SOURCE).mkdir()
            copy_companions(self._originals, self.partial / SOURCE)
        if self._sync is not None:
            self._sync.result()
        self.sync()
        for path in self.partial.rglob("*"):
            if path not in self._synced:
                sync_directory(path) if path.is_dir() else sync_file(path)
        sync_directory(self.partial)

    def release(self) -> None:
        self._pool.shutdown()


def chunk_shape(array: np.ndarray, parts: Shape) -> list[int]:
    """What of an array is encoded at once: within one part, some of its rows."""
    part = [max(1, size // count) for size, count in zip(array.shape, parts, strict=True)]
    if not part:
        return []
    rows = max(1, BLOCK // (math.prod(part[1:]) * array.itemsize))
    if rows >= part[0]:
        return part
    # Parts begin where chunks begin.
    rows = max(n for n in range(1, rows + 1) if part[0] % n == 0) if parts[0] > 1 else rows
    return [rows, *part[1:]]


def best_tree(names: Iterable[str], buffers: Sequence[str]) -> Any:
    """The tree of a model, with the names of tensors for leaves."""
    tree: dict[str, Any] = {part: {} for part in PARTS}
    for name in names:
        *parents, leaf = name.split(".")
        node = tree[PARTS[name in buffers]]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = name
    return tree


def named_leaves(tree: Any) -> Iterator[tuple[str, str]]:
    """Where in the store each tensor of a tree of names goes, and its name."""
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        if isinstance(leaf, str):
            yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def zarr_dtype(dtype: np.dtype) -> str:
    """The name of a dtype in zarr."""
    return dtype.str if dtype.kind in "biufc" and dtype.name != "bfloat16" else dtype.name
