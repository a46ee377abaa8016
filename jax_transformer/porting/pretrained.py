"""Models that were made elsewhere, in Python: `from_pretrained` and `save_pretrained`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from jax_transformer.config import BOS_ID, EOS_ID, DecoderOnlyConfig
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.text_stream import TextCodec
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree, flatten, split, unflatten
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.formats.base import Checkpoint, LazyTensor, read_json
from jax_transformer.porting.identify import OWN, Identified, identify, make_model, skeleton
from jax_transformer.porting.port import END, Format, names_of, own_config, way_of
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.stream import port, stream
from jax_transformer.training.run import RunDirectory


class PretrainedTokenizer:
    """A `tokenizer.json` of the `tokenizers` package, as `transformers` uses it.

    Raises:
        InputError: a file that is none.
    """

    def __init__(self, path: Path):
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises nothing narrower.
            raise InputError(f"{path} is no tokenizer ({error}): copy it again") from None

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model with weights.

    Attributes:
        config: of the model; its kind is that of the model.
        graphdef, params, buffers: the model in parts (`models.parameters.split`).
        tokenizer: None where there is no `tokenizer.json`.
        start_id: the token that is put before each prompt, if the tokenizer does not.
        end_ids: the tokens that end a text.
        source: where it came from, of which `save_pretrained` keeps config and tokenizer.
    """

    config: Config
    graphdef: nnx.GraphDef
    params: Tree
    buffers: Tree
    tokenizer: TextCodec | None
    start_id: int | None
    end_ids: tuple[int, ...]
    source: Identified

    @property
    def model(self) -> Any:
        """The model in one."""
        return nnx.merge(self.graphdef, self.params, self.buffers)

    def generator(self) -> TextGenerator:
        """What continues prompts.

        Raises:
            InputError: another kind of model, or one without a tokenizer.
        """
        path = self.source.checkpoint.path
        if not isinstance(self.config, DecoderOnlyConfig):
            raise InputError(f"{path} holds no model that continues text")
        if self.tokenizer is None:
            raise InputError(f"{path} has no tokenizer.json: copy the tokenizer of the model there")
        return TextGenerator(
            self.graphdef,
            self.params,
            self.buffers,
            self.config,
            self.tokenizer,
            start_id=self.start_id,
            end_ids=self.end_ids,
        )


def from_pretrained(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    family: str | None = None,
) -> Pretrained:
    """The model of a Hugging Face folder, a ported directory, a run, or any file that `port` takes.

    Args:
        path: of the folder or file.
        dtype: of the floating-point parameters; by default each keeps its own.
        family: its family, where files do not say it.

    Raises:
        InputError: what `jax-transformer port` refuses; float64 while JAX has none.
    """
    source = identify(open_checkpoint(Path(path)), family)
    wanted = None if dtype is None else np.dtype(dtype)
    graphdef, shapes, buffer_shapes = skeleton(source.config)
    leaves: dict[str, jax.Array] = {}
    plan = source.plan()
    for name, array in stream(plan, source.checkpoint.tensors, wanted):
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise InputError(
                f"{path}: {name} is {array.dtype}, which JAX has only after jax.config.update("
                f"'jax_enable_x64', True): set that, or dtype='float32'"
            )
        leaves[name] = jnp.array(array)  # a copy: the array is the file
    names = flatten(shapes)
    params = unflatten({name: leaf for name, leaf in leaves.items() if name in names}, shapes)
    given = {name: leaf for name, leaf in leaves.items() if name not in names}
    if given or not jax.tree.leaves(buffer_shapes):
        buffers = unflatten(given, buffer_shapes)
    else:
        buffers = jax.jit(lambda: split(make_model(source.config))[2])()
    tokenizer, start_id, end_ids = text_of(source)
    return Pretrained(
        config=source.config,
        graphdef=graphdef,
        params=params,
        buffers=buffers,
        tokenizer=tokenizer,
        start_id=start_id,
        end_ids=end_ids,
        source=dataclasses.replace(source, names=names_of(source, plan)),
    )


def text_of(source: Identified) -> tuple[TextCodec | None, int | None, tuple[int, ...]]:
    """The tokenizer, the token before prompts and those after texts.

    Raises:
        InputError: a tokenizer that is damaged.
    """
    path, values = source.checkpoint.path, source.checkpoint.config
    if source.checkpoint.format == OWN and "task" in values:
        run = RunDirectory(path)
        tokenizer = run.load_tokenizer(run.load_model_config()) if run.tokenizer.exists() else None
        return tokenizer, BOS_ID, (EOS_ID,)
    files = {file.name: file for file in source.checkpoint.companions}
    found = files.get("tokenizer.json")
    tokenizer = None if found is None else PretrainedTokenizer(found)
    return tokenizer, None, end_tokens(source)


def end_tokens(source: Identified) -> tuple[int, ...]:
    """What ends a text: as `generation_config.json` says, else the config it came with, else the
    metadata of GGUF."""
    files = {file.name: file for file in source.checkpoint.companions}
    for path in (files.get("generation_config.json"), source.originals.get("config.json")):
        if path is not None and (found := read_json(path).get("eos_token_id")) is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    found = source.checkpoint.config.get(END)
    return () if found is None else (found,)


def save_pretrained(
    model: Pretrained, path: str | os.PathLike[str], to: Format | None = None
) -> None:
    """Write a model with the config and the tokenizer that it came with.

    Args:
        model: of `from_pretrained`, perhaps with other parameters (`dataclasses.replace`).
        path: a new folder or file.
        to: its format; by default a folder that `transformers` loads, and a directory of ours
            where that has no such model.

    Raises:
        InputError: `path` is there already or cannot be written, parameters that do not fit.
    """
    tensors = {
        name: LazyTensor(leaf.shape, np.dtype(leaf.dtype), lambda leaf=leaf: np.asarray(leaf))
        for name, leaf in (flatten(model.params) | flatten(model.buffers)).items()
    }
    before = model.source.checkpoint
    checkpoint = Checkpoint(
        path=before.path,
        format=OWN,
        tensors=tensors,
        config=own_config(model.source),
        companions=before.companions,
    )
    if to is None:
        to = "huggingface" if model.source.family.model_types else OWN
    way = way_of(dataclasses.replace(model.source, checkpoint=checkpoint), Path(path), to)
    port(way.plan, tensors, way.make_writer, about=way.about)
