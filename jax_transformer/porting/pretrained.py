"""Models that were made elsewhere, in Python: `from_pretrained` and `save_pretrained`."""

import contextlib
import dataclasses
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_transformer.config import (
    EOS_ID,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    GenerationConfig,
    ModelConfig,
)
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.transcribe import Transcriber
from jax_transformer.decoding.translate import Translator
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree, flatten, split, unflatten
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.formats.base import Checkpoint, LazyTensor
from jax_transformer.porting.generation import rules_of
from jax_transformer.porting.identify import OWN, Identified, identify, make_model, skeleton
from jax_transformer.porting.optimizer import PREFIXES, AdamSettings, AdamState
from jax_transformer.porting.place import Shardings, place, shardings_of
from jax_transformer.porting.port import Format, names_of, own_config, way_of
from jax_transformer.porting.port_optimizer import state_of, whole_plan
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.speech import speech_rules
from jax_transformer.porting.stream import headers, port, stream
from jax_transformer.porting.text import AnyTokenizer, tokenizer_of


class Adam(NamedTuple):
    """The state of Adam or AdamW.

    Attributes:
        first, second: moments, in trees as the parameters.
        average: the running average of the parameters, if there is one.
        updates: made so far.
        settings: the hyperparameters.
    """

    first: Tree
    second: Tree
    average: Tree | None
    updates: int
    settings: AdamSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model with weights.

    Attributes:
        config: of the model; its kind is that of the model.
        graphdef, params, buffers: the model in parts (`models.parameters.split`).
        tokenizer: None where there are no files of one.
        source: where it came from, of which `save_pretrained` keeps config and tokenizer.
        optimizer: if it was asked for.
    """

    config: Config
    graphdef: nnx.GraphDef
    params: Tree
    buffers: Tree
    tokenizer: AnyTokenizer | None
    source: Identified
    optimizer: Adam | None = None

    @property
    def model(self) -> Any:
        """The model in one."""
        return nnx.merge(self.graphdef, self.params, self.buffers)

    @property
    def rules(self) -> GenerationConfig:
        """What its texts begin and end with, by `generation_config.json`.

        Raises:
            InputError: what is said there cannot be followed.
        """
        return rules_of(self.source)

    def generator(self) -> TextGenerator:
        """What continues prompts.

        Raises:
            InputError: another kind of model, one without a tokenizer, or `rules` that a generator
                does not keep.
        """
        path, codec, rules = self.source.checkpoint.path, self.tokenizer, self.rules
        if not isinstance(self.config, DecoderOnlyConfig):
            raise InputError(f"{path} holds no model that continues text")
        model = self.graphdef, self.params, self.buffers, self.config
        with named(path):
            return TextGenerator(*model, needed(codec), rules=rules)

    def translator(self) -> Translator:
        """What translates sentences, or whatever else its encoder reads: called with `params` and
        texts.

        Raises:
            InputError: another kind of model, one without a tokenizer, or `rules` about tokens
                that it does not have.
        """
        path, codec, rules = self.source.checkpoint.path, self.tokenizer, self.rules
        if not isinstance(self.config, EncoderDecoderConfig | ModelConfig):
            raise InputError(f"{path} holds no model that translates")
        end = EOS_ID if isinstance(codec, Tokenizer) else None
        model = self.graphdef, self.buffers, self.config
        with named(path):
            return Translator(*model, needed(codec), rules=rules, source_end_id=end)

    def transcriber(self, language: str | None = None, task: str | None = None) -> Transcriber:
        """What writes down speech: called with log-mel features.

        Args:
            language: that is spoken, `de` say, where the model knows several.
            task: `transcribe` (the default) or `translate`, into English.

        Raises:
            InputError: another kind of model, one without a tokenizer, a language or task that it
                does not know, or rules that are not built.
        """
        path, codec = self.source.checkpoint.path, self.tokenizer
        if not isinstance(self.config, EncoderDecoderConfig) or self.config.audio is None:
            raise InputError(f"{path} holds no model that reads sound")
        rules = speech_rules(self.source, language, task)
        model = self.graphdef, self.params, self.buffers, self.config
        with named(path):
            return Transcriber(*model, needed(codec), rules=rules)


@contextlib.contextmanager
def named(path: Path) -> Generator[None]:
    """Say in an `InputError` which model it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def needed(tokenizer: AnyTokenizer | None) -> Any:
    """The tokenizer.

    Raises:
        InputError: there is none.
    """
    if tokenizer is None:
        raise InputError("it has no tokenizer.json: copy the tokenizer of the model there")
    return tokenizer


def from_pretrained(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    family: str | None = None,
    with_optimizer: bool = False,
    sharding: Mesh | str | Shardings | None = None,
) -> Pretrained:
    """The model of a Hugging Face folder, a ported directory, a run, or any file that `port` takes.

    Args:
        path: of the folder or file.
        dtype: of the floating-point parameters; by default each keeps its own.
        family: its family, where files do not say it.
        with_optimizer: Adam's state too; of a run what it goes on from, not its best model.
        sharding: split the tensors over devices as they are read, with no copy of all of them on
            the host: `data=1,model=8`, a mesh of such axes (see `training.mesh`), or what gives the
            sharding of each dotted name. By default all are on the first device.

    Raises:
        InputError: what `jax-transformer port` refuses; float64 while JAX has none; too few
            devices, or more than can split a tensor equally.
    """
    source = identify(open_checkpoint(Path(path), latest=with_optimizer), family)
    wanted = None if dtype is None else np.dtype(dtype)
    graphdef, shapes, buffer_shapes = skeleton(source.config)
    plan = source.plan()
    whole, tensors, state = plan, source.checkpoint.tensors, None
    if with_optimizer:
        state, _ = state_of(source, plan)
        whole, tensors = whole_plan(source, plan, state)
    made = headers(whole, wanted)
    for name, header in made.items():
        if jax.dtypes.canonicalize_dtype(header.dtype) != header.dtype:
            raise InputError(
                f"{path}: {name} is {header.dtype}, which JAX has only after jax.config.update("
                f"'jax_enable_x64', True): set that, or dtype='float32'"
            )
    put: Shardings | None = None
    if sharding is None:
        # Copies: the arrays are the file.
        leaves = {name: jnp.array(array) for name, array in stream(whole, tensors, wanted)}
    else:
        with named(Path(path)):
            put = shardings_of(sharding, {name: header.shape for name, header in made.items()})
        leaves = dict(place(whole, tensors, wanted, put))
    names = flatten(shapes)
    params = unflatten({name: leaf for name, leaf in leaves.items() if name in names}, shapes)
    optimizer = None if state is None else adam_of(state, leaves, shapes)
    given = {name: leaves[name] for name in flatten(buffer_shapes) if name in leaves}
    if given or not jax.tree.leaves(buffer_shapes):
        buffers = unflatten(given, buffer_shapes)
    else:
        buffers = jax.jit(lambda: split(make_model(source.config))[2])()
        if put is not None:
            moved = {n: jax.device_put(leaf, put(n)) for n, leaf in flatten(buffers).items()}
            buffers = unflatten(moved, buffers)
    return Pretrained(
        config=source.config,
        graphdef=graphdef,
        params=params,
        buffers=buffers,
        tokenizer=tokenizer_of(source),
        source=dataclasses.replace(source, names=names_of(source, plan)),
        optimizer=optimizer,
    )


def adam_of(state: AdamState, leaves: Mapping[str, jax.Array], shapes: Tree) -> Adam:
    """Adam's state in trees, from the leaves of a plan of `optimizer.with_moments`."""
    trees: dict[str, Tree] = {}
    for kind in state.tensors:
        before = PREFIXES[OWN][kind]
        trees[kind] = unflatten({name: leaves[before + name] for name in flatten(shapes)}, shapes)
    return Adam(
        first=trees["first"],
        second=trees["second"],
        average=trees.get("average"),
        updates=state.updates,
        settings=state.settings,
    )


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
