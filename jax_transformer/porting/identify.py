"""What model a checkpoint holds: its family, its config, and under which names its tensors are."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.config import DecoderOnlyConfig, ModelConfig, from_dict
from jax_transformer.errors import InputError
from jax_transformer.porting.families import FAMILIES, llama_gguf, llama_meta, transformer
from jax_transformer.porting.families.base import Config, Family, read_config, write_config
from jax_transformer.porting.formats import meta
from jax_transformer.porting.formats.base import MANIFEST, Checkpoint, LazyTensor, read_json
from jax_transformer.porting.formats.huggingface import CONFIG
from jax_transformer.porting.plan import Plan, make_plan, unwrap
from jax_transformer.porting.recognise import family_of
from jax_transformer.porting.rules import Alias
from jax_transformer.porting.stream import copy_plan

OWN = "orbax"
"""The format of the project's own directories, whose names are those of our models."""

LAYOUTS = {("llama", "meta"): llama_meta.FAMILY, ("llama", "gguf"): llama_gguf.FAMILY}
"""Tables of other names than those of `transformers`: by family and format."""

ORIGINALS = {"huggingface": CONFIG, "pt": CONFIG, "safetensors": CONFIG, "meta": meta.PARAMS}
"""The file that a format has its config in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identified:
    """A checkpoint and the model in it.

    Attributes:
        family: the table of its names in `transformers`.
        config: ours.
        originals: the configs of the files that it came from, by name.
        names: shapes of the tensors that these files had, by name, where that is known.
    """

    checkpoint: Checkpoint
    family: Family
    config: Config
    originals: Mapping[str, Path]
    names: Mapping[str, tuple[int, ...]] | None = None

    @property
    def table(self) -> Family:
        """The table of the names that the checkpoint has."""
        return layout(self.family, self.checkpoint.format)

    def plan(self) -> Plan:
        """From the names of the checkpoint to ours.

        Raises:
            InputError: tensors that do not fit the model, all in one line.
        """
        shapes = leaf_shapes(self.config)
        if self.checkpoint.format == OWN:
            return copy_plan(self.own_tensors(shapes))
        try:
            return make_plan(self.table.rules(self.config), self.checkpoint.tensors, shapes)
        except InputError as error:
            raise InputError(f"{self.checkpoint.path} as {self.family.name}: {error}") from None

    def own_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
        """The tensors of one of our directories, all there.

        Raises:
            InputError: one is missing or has another shape.
        """
        path, tensors = self.checkpoint.path, self.checkpoint.tensors
        for name, shape in shapes.items():
            found = tensors[name].shape if name in tensors else None
            if found != shape:
                what = "is missing" if found is None else f"is {list(found)}"
                raise InputError(f"{path}: {name} {what}, must be {list(shape)} by its config")
        return {name: tensors[name] for name in shapes}

    def plain_names(self, plan: Plan) -> dict[str, str]:
        """Name in the file -> name without what wrappers put there, of what has a place in `plan`.

        A table that has only its second name goes by the first.
        """
        rules = self.table.rules(self.config)
        used = {name for move in plan.moves for name in move.sources} | plan.tied.keys()
        plain = unwrap(rules, self.checkpoint.tensors, leaf_shapes(self.config))
        names = {of: name for name, of in plain.items() if of in used}
        for rule in rules:
            if isinstance(rule, Alias) and rule.of not in plain and rule.source in plain:
                names[plain[rule.source]] = rule.of
        return names


def identify(checkpoint: Checkpoint, family: str | None = None) -> Identified:
    """The model of a checkpoint.

    Args:
        checkpoint: opened.
        family: a name or `model_type`; by default what the checkpoint seems to be.

    Raises:
        InputError: a family or a config that is not known or not there.
    """
    path = checkpoint.path
    if checkpoint.format == OWN:
        return identify_own(checkpoint, family)
    values = dict(checkpoint.config) or config_beside(path)
    own = values.get("model") if isinstance(values.get("model"), dict) else None
    name = family or (values.get("family") if own else None) or family_of(checkpoint)
    if name is None:
        raise InputError(f"{path}: nothing says its family: give --family, one of {known()}")
    described = family_named(name, path)
    table = layout(described, checkpoint.format)
    if own is None and (not values or described is transformer.FAMILY):
        raise InputError(f"{path} has no {CONFIG} beside it that says its sizes: copy it there")
    if table is llama_gguf.FAMILY:
        values = llama_gguf.values_of(values, checkpoint.tensors)
    try:
        if own is not None:
            config: Config = from_dict(described.config, own, place="model")
        else:
            config = read_config(table, values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    original = ORIGINALS.get(checkpoint.format) if own is None else None
    folder = path if path.is_dir() else path.parent
    originals = {original: folder / original} if original else {}
    if not checkpoint.config:
        checkpoint = dataclasses.replace(checkpoint, config=values)
    return Identified(checkpoint=checkpoint, family=described, config=config, originals=originals)


def config_beside(path: Path) -> dict[str, Any]:
    """What the manifest beside a file that was ported says of the model."""
    manifest = path.with_name(f"{path.name}.{MANIFEST}")
    return (read_json(manifest).get("config") or {}) if manifest.is_file() else {}


def identify_own(checkpoint: Checkpoint, family: str | None) -> Identified:
    """The model of a run or of a ported directory.

    Raises:
        InputError: a config that is not known or damaged.
    """
    path, values = checkpoint.path, checkpoint.config
    place = f"{path / CONFIG}: model"
    stated = values.get("family")
    if stated is not None:
        described = family_named(str(stated), path)
        config: Config = from_dict(described.config, values.get("model"), place=place)
    elif values.get("task") == "language":
        config = from_dict(DecoderOnlyConfig, values.get("model"), place=place)
        described = family_named(family, path) if family else first_family(config, path)
    elif values.get("task") == "translation":
        config = from_dict(ModelConfig, values.get("model"), place=place)
        described = transformer.FAMILY
    else:
        raise InputError(f"{path / CONFIG} says neither a task nor a family: restore it")
    if family is not None and family_named(family, path) is not described:
        raise InputError(f"--family {family}: {path} holds a model of {described.name}")
    folder = path / "source"
    found = {name: folder / name for name in ORIGINALS.values() if (folder / name).is_file()}
    manifest = path / MANIFEST
    names = read_json(manifest).get("names") if manifest.is_file() else None
    return Identified(
        checkpoint=checkpoint,
        family=described,
        config=config,
        originals=found,
        names=None if names is None else {name: tuple(shape) for name, shape in names.items()},
    )


def family_named(name: str, path: Path) -> Family:
    """The family of that name or `model_type`.

    Raises:
        InputError: there is none.
    """
    for family in (transformer.FAMILY, *FAMILIES):
        if name == family.name or name in family.model_types:
            return family
    raise InputError(f"{path}: family {name!r} is not known: must be one of {known()}")


def known() -> str:
    """The names of all families."""
    return ", ".join(family.name for family in (transformer.FAMILY, *FAMILIES))


def first_family(config: Config, path: Path) -> Family:
    """The first family that can express a model that was trained here.

    Raises:
        InputError: none can.
    """
    for family in FAMILIES:
        if family.config is type(config):
            try:
                write_config(family, config)
            except InputError:
                continue
            return family
    raise InputError(f"{path}: no family of {known()} has a config for this model")


def layout(family: Family, format: str) -> Family:
    """The table of a family's names in files of that format.

    Raises:
        InputError: the family is not in such files.
    """
    if format not in ("meta", "gguf"):
        return family
    if (family.name, format) not in LAYOUTS:
        raise InputError(f"{family.name} in the format {format} is not known: llama is")
    return LAYOUTS[family.name, format]


def skeleton(config: Config) -> Any:
    """`split` of the model, with shapes for leaves."""
    from flax import nnx

    from jax_transformer.models.parameters import split

    return split(nnx.eval_shape(lambda: make_model(config)))


def make_model(config: Config) -> Any:
    """A new model of that config."""
    from flax import nnx

    from jax_transformer import models
    from jax_transformer.config import EncoderDecoderConfig, EncoderOnlyConfig

    rngs = nnx.Rngs(0)
    if isinstance(config, ModelConfig):
        return models.Transformer.from_config(config, rngs=rngs)
    if isinstance(config, EncoderDecoderConfig):
        return models.EncoderDecoder(config, rngs=rngs)
    if isinstance(config, EncoderOnlyConfig):
        return models.EncoderOnly(config, rngs=rngs)
    return models.DecoderOnly(config, rngs=rngs)


def leaf_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of what is ported: the parameters, and the buffers where files have them too."""
    params, buffers = shallow_shapes(config)
    leaves = params | (buffers if keeps_buffers(config) else {})
    shapes: dict[str, tuple[int, ...]] = {}
    for name in leaves:
        stack, layer, _ = name.partition("layers.0.")
        if not layer:
            shapes[name] = leaves[name]
        elif name not in shapes:
            first = {n: shape for n, shape in leaves.items() if n.startswith(stack + layer)}
            for index in range(depth(config, stack)):
                of = f"{stack}layers.{index}."
                shapes |= {of + n.removeprefix(stack + layer): s for n, s in first.items()}
    return shapes


def buffer_names(config: Config) -> tuple[str, ...]:
    """Those of `leaf_shapes` that are no parameters."""
    return tuple(shallow_shapes(config)[1]) if keeps_buffers(config) else ()


@functools.cache
def shallow_shapes(config: Config) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Shapes of parameters and of buffers, of the first layer of each stack alone: the others are
    like it, and JAX takes seconds to think of thirty layers."""
    from jax_transformer.models.parameters import flatten

    one = dict.fromkeys((field for field in DEPTHS.values() if hasattr(config, field)), 1)
    if isinstance(config, DecoderOnlyConfig):  # Some layers differ, but not in their shapes.
        config = dataclasses.replace(config, local_layer=None, local_layers=())
    _, *parts = skeleton(dataclasses.replace(config, **one))
    return tuple({name: tuple(leaf.shape) for name, leaf in flatten(p).items()} for p in parts)


DEPTHS = {
    "": "num_layers",
    "encoder.": "num_encoder_layers",
    "decoder.": "num_decoder_layers",
}
"""Stack of layers -> how many it has."""


def depth(config: Config, stack: str) -> int:
    """The number of layers of a stack."""
    return getattr(config, DEPTHS[stack])


def keeps_buffers(config: Config) -> bool:
    """Whether files have the tables of positions that are not trained: those of the lecture
    document's script, and Whisper's."""
    return isinstance(config, ModelConfig) or getattr(config, "audio", None) is not None
