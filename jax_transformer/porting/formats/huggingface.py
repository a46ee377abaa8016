"""Folders of the `transformers` package: `config.json`, weights in one file or in shards with an
index, and the files of the tokenizer."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import safetensors_file, torch_file
from jax_transformer.porting.formats.base import (
    Checkpoint,
    Companion,
    LazyTensor,
    Writer,
    read_json,
    sync_directory,
    sync_file,
    write_json,
)
from jax_transformer.porting.plan import Header

FORMAT = "huggingface"

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"

COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "special_tokens_map.json",
    "spiece.model",
    "target.spm",
    "target_vocab.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""Files beside the weights that belong to the model."""


def read(path: Path) -> Checkpoint:
    """A folder; safetensors where it has both kinds of weights.

    Raises:
        InputError: no config, no weights, or files that do not fit each other.
    """
    config = read_json(path / CONFIG)
    tensors, metadata = read_weights(path)
    return Checkpoint(
        path=path,
        format=FORMAT,
        tensors=tensors,
        config=config,
        metadata=metadata,
        companions=companions(path),
    )


def read_weights(path: Path) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors of a folder, and what else its files say.

    Raises:
        InputError: there are none, or files that do not fit each other.
    """
    for name, read_file in (
        (SAFETENSORS, safetensors_file.read_file),
        (TORCH, torch_file.read_file),
    ):
        index = path / f"{name}.index.json"
        if index.is_file():
            locations, metadata = safetensors_file.read_index(index)
            return safetensors_file.gather(index, locations, read_file), metadata
        if (path / name).is_file():
            tensors, metadata = read_file(path / name)
            return tensors, dict(metadata)
    shards = sorted(file.name for file in path.glob("*-of-*") if file.suffix != ".json")
    if shards:
        raise InputError(f"{path} has {shards[0]}, but no index of its shards: copy that too")
    raise InputError(
        f"{path} has neither {SAFETENSORS} nor {TORCH}, nor an index of shards: see that all of "
        f"the model has been downloaded"
    )


def companions(path: Path) -> tuple[Path, ...]:
    """The files of a folder that belong to the model and are not its weights."""
    return tuple(path / name for name in COMPANIONS if (path / name).is_file())


class FolderWriter(Writer):
    """A folder of shards of safetensors that `transformers` loads.

    Args:
        path, headers: see `Writer`.
        config: the content of `config.json`.
        companions: files to copy beside it.
        shard_bytes: the most bytes of a shard of more than one tensor.

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
        shard_bytes: int = 5 * 10**9,
    ):
        super().__init__(path, headers)
        self._config = config
        self._companions = companions
        self._places = shard_names(self.headers, shard_bytes)
        self._shards: dict[str, safetensors_file.FileWriter] = {}

    def open(self) -> None:
        self.partial.mkdir()
        for file in dict.fromkeys(self._places.values()):
            headers = {n: self.headers[n] for n, place in self._places.items() if place == file}
            self._shards[file] = safetensors_file.FileWriter(self.partial / file, headers)
            self._shards[file].__enter__()

    def write(self, name: str, array: np.ndarray) -> None:
        self._shards[self._places[name]].add(name, array)

    def finish(self) -> None:
        for shard in self._shards.values():
            shard.__exit__(None)
        if len(self._shards) > 1:
            total = sum(header.nbytes for header in self.headers.values())
            write_json(
                self.partial / f"{SAFETENSORS}.index.json",
                {
                    "metadata": {"total_size": total},
                    "weight_map": dict(sorted(self._places.items())),
                },
            )
        write_json(self.partial / CONFIG, self._config)
        copy_companions(self._companions, self.partial)

    def release(self) -> None:
        for shard in self._shards.values():
            shard.release()


def shard_names(headers: Mapping[str, Header], most: int) -> dict[str, str]:
    """Tensor -> file, filled in order."""
    numbers: dict[str, int] = {}
    number = filled = 0
    for name, header in headers.items():
        if filled and filled + header.nbytes > most:
            number, filled = number + 1, 0
        filled += header.nbytes
        numbers[name] = number
    if not number:
        return dict.fromkeys(headers, SAFETENSORS)
    return {
        name: f"model-{index + 1:05d}-of-{number + 1:05d}.safetensors"
        for name, index in numbers.items()
    }


def copy_companions(files: Sequence[Companion], folder: Path) -> None:
    """Copies of files, on the disk."""
    for file in files:
        if isinstance(file, Path):
            shutil.copyfile(file, folder / file.name)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
        sync_file(folder / file.name)
    sync_directory(folder)
