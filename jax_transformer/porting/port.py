"""`jax-transformer port`: a checkpoint in one format becomes one in another."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import ml_dtypes  # noqa: F401  makes bfloat16 a dtype of NumPy
import numpy as np
import tyro
from rich.console import Console

from jax_transformer.config import BOS_ID, EOS_ID, PAD_ID
from jax_transformer.errors import InputError
from jax_transformer.porting import generation
from jax_transformer.porting.families import transformer
from jax_transformer.porting.families.base import Values, read_config, write_config
from jax_transformer.porting.formats import (
    huggingface,
    meta,
    safetensors_file,
    torch_file,
)
from jax_transformer.porting.formats.base import (
    Checkpoint,
    LazyTensor,
    Writer,
    header_of,
    read_json,
)
from jax_transformer.porting.identify import (
    ORIGINALS,
    OWN,
    Identified,
    buffer_names,
    config_beside,
    identify,
    layout,
)
from jax_transformer.porting.inspect import plan_table
from jax_transformer.porting.operations import Operation, Shape
from jax_transformer.porting.plan import Header, Move, Plan, make_plan_back
from jax_transformer.porting.port_optimizer import check_formats, moments_of
from jax_transformer.porting.recognise import family_of, open_checkpoint
from jax_transformer.porting.stream import copy_plan, port
from jax_transformer.porting.vocabulary import check_vocabulary

Format = Literal["orbax", "huggingface", "safetensors", "pt", "meta"]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]

SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".pt": "pt",
    ".pth": "pt",
    ".bin": "pt",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Port:
    """Bring a checkpoint into another format, weights bit for bit.

    Without --to, a file or folder of others becomes a directory of ours, which `generate` and
    `from_pretrained` take, and such a directory a folder that `transformers` loads.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A run, a ported directory, a Hugging Face or Meta folder, a file of safetensors, PyTorch or
    GGUF."""
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DESTINATION")]
    """New folder, or file of `safetensors` and `pt`."""
    to: Annotated[
        Format | None,
        tyro.conf.arg(help_behavior_hint="(default: by the suffix, else orbax or huggingface)"),
    ] = None
    """Format of the destination."""
    family: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: recognised)")
    ] = None
    """Family of the model."""
    dtype: Annotated[
        Dtype | None, tyro.conf.arg(help_behavior_hint="(default: each keeps its own)")
    ] = None
    """Of the floating-point tensors."""
    with_optimizer: bool = False
    """With Adam's moments and the number of updates: between a run and a training checkpoint of
    PyTorch (`.pt`)."""
    sharding: Annotated[
        str | None, tyro.conf.arg(metavar="data=N,model=M", help_behavior_hint="(default: whole)")
    ] = None
    """Lay the tensors of our directory out in the parts that the devices of such a mesh read, each
    its own, by `from_pretrained(DESTINATION, sharding=...)`."""
    dry_run: bool = False
    """Only show what would become of each tensor."""


class Way(NamedTuple):
    """All that is known before a tensor is read."""

    plan: Plan
    make_writer: Callable[[Mapping[str, Header]], Writer]
    about: dict[str, Any]
    """What the manifest says of the source."""
    tensors: Mapping[str, LazyTensor]
    """That the plan is for."""
    notes: tuple[str, ...] = ()
    """What a user should know."""


def port_command(options: Port) -> None:
    """Port, or show the plan.

    Raises:
        InputError: anything that does not fit, before anything is written; a destination that is
            there already or cannot be written.
    """
    checkpoint = open_checkpoint(options.source, latest=options.with_optimizer)
    dtype = None if options.dtype is None else np.dtype(options.dtype)
    to = options.to or format_for(options.destination, checkpoint)
    find = find_way_with_optimizer if options.with_optimizer else find_way
    way = find(checkpoint, options.destination, to, family=options.family, dtype=dtype)
    if options.sharding is not None:
        way = in_parts(way, options.sharding, to)
    console = Console(highlight=False)
    source = way.about["source"]
    console.print(
        f"{options.source}: format {source['format']}, family {source['family'] or 'unknown'}; "
        f"to {to}",
        soft_wrap=True,
        markup=False,
    )
    for note in way.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    if options.dry_run:
        console.print(plan_table(way.plan, dtype))
        return
    manifest = port(way.plan, way.tensors, way.make_writer, dtype=dtype, about=way.about)
    for name, reason in way.plan.ignored.items():
        console.print(f"ignored {name}: {reason}", soft_wrap=True, markup=False)
    count = len(manifest["tensors"])
    console.print(f"{options.destination}: {count:,} tensors", soft_wrap=True, markup=False)


def in_parts(way: Way, sharding: str, to: Format) -> Way:
    """The same, tensors laid out for a mesh.

    Raises:
        InputError: another format than ours, no sizes of a mesh, or some that do not divide.
    """
    from jax_transformer.training.mesh import parse_axes, parts_of

    sizes = parse_axes(sharding)
    if to != OWN:
        raise InputError(f"--sharding: only our directories are laid out for devices, not {to}")
    parts = parts_of({name: header.shape for name, header in way.plan.headers().items()}, sizes)
    options: dict[str, Any] = {"parts": parts}
    make_writer = functools.partial(way.make_writer, **options)
    return way._replace(make_writer=make_writer, about={**way.about, "sharding": sizes})


def format_for(destination: Path, checkpoint: Checkpoint) -> Format:
    """The format that a destination most likely is to have."""
    if destination.suffix in SUFFIXES:
        return SUFFIXES[destination.suffix]
    if checkpoint.format != OWN:
        return OWN
    config = checkpoint.config
    ours = config.get("task") == "translation" and generation.PART not in config
    return "pt" if ours else "huggingface"


def find_way(
    checkpoint: Checkpoint,
    destination: Path,
    to: Format,
    *,
    family: str | None = None,
    dtype: np.dtype | None = None,
) -> Way:
    """What goes where, checked by the headers.

    Raises:
        InputError: a family, config or tensors that do not fit each other, or the format.
    """
    files = ("pt", "safetensors")
    if to in files and checkpoint.format in files and family is None:
        about = {"source": describe(checkpoint, family_of(checkpoint))}
        if config := config_beside(checkpoint.path):
            about["config"] = config
        plan = copy_plan(checkpoint.tensors)
        return Way(plan, file_writer(destination, to), about, checkpoint.tensors)
    return way_of(identify(checkpoint, family), destination, to, dtype)


def find_way_with_optimizer(
    checkpoint: Checkpoint,
    destination: Path,
    to: Format,
    *,
    family: str | None = None,
    dtype: np.dtype | None = None,
) -> Way:
    """As `find_way`, with the optimizer.

    Raises:
        InputError: as `find_way`; no optimizer, or one that cannot be carried.
    """
    check_formats(checkpoint, to)
    model = identify(checkpoint, family)
    way = way_of(model, destination, to, dtype)
    moments = moments_of(model, way.plan, own_config(model), dtype)
    return Way(
        moments.plan,
        functools.partial(way.make_writer, **moments.options),
        way.about | moments.about,
        moments.tensors,
        (*way.notes, *moments.notes),
    )


def way_of(model: Identified, destination: Path, to: Format, dtype: np.dtype | None = None) -> Way:
    """What goes where, of a checkpoint whose model is known.

    Raises:
        InputError: as `find_way`.
    """
    checkpoint = model.checkpoint
    notes = check_vocabulary(model)
    if to == "huggingface" and not model.family.model_types:
        name = model.family.name
        raise InputError(f"{checkpoint.path}: transformers has no family {name}: give --to pt")
    there = model.plan()
    about: dict[str, Any] = {"source": describe(checkpoint, model.family.name)}
    if to in ("pt", "safetensors"):
        about["config"] = own_config(model)
    elif to == OWN:
        about["names"] = names_of(model, there)
    plan = there if to == OWN else plan_to(model, there, to)
    make_writer = writer_for(model, destination, to, dtype)
    return Way(plan, make_writer, about, checkpoint.tensors, (*notes, *lost(model, to)))


def describe(checkpoint: Checkpoint, family: str | None) -> dict[str, Any]:
    """The source, for the manifest."""
    return {"name": checkpoint.path.name, "format": checkpoint.format, "family": family}


def names_of(model: Identified, plan: Plan) -> Mapping[str, Shape] | None:
    """The tensors that the model had where it came from: by name, the shape of each."""
    if model.checkpoint.format == OWN:
        return model.names
    tensors = model.checkpoint.tensors
    return {name: tensors[of].shape for of, name in model.plain_names(plan).items()}


def plan_to(model: Identified, there: Plan, to: Format) -> Plan:
    """From the names of the checkpoint to those of the destination.

    Args:
        model: in the checkpoint.
        there: from its names to ours.
        to: a format of others.

    Raises:
        InputError: tensors that do not fit the model.
    """
    target = layout(model.family, to)
    if model.checkpoint.format != OWN and model.table is target:
        return rename(there, model)
    # What ours is made into again has the names that it had.
    names = model.names if unchanged(model, to) else None
    aliases = target is transformer.FAMILY
    back = make_plan_back(target.rules(model.config), there.headers(), names, aliases=aliases)
    return compose(there, back)


def unchanged(model: Identified, to: Format) -> bool:
    """Whether the model came from that format and is still what its config says."""
    if ORIGINALS[to] not in model.originals:
        return False
    original = read_json(model.originals[ORIGINALS[to]])
    return write_config(layout(model.family, to), model.config, original) == original


def rename(plan: Plan, model: Identified) -> Plan:
    """Every tensor that has a place as it is, without what wrappers put before its name."""
    tensors = model.checkpoint.tensors
    moves = tuple(
        Move((of,), (name,), (), (tensors[of].shape,), header_of(tensors[of]).dtype)
        for of, name in model.plain_names(plan).items()
    )
    return dataclasses.replace(plan, moves=moves, computed={})


def compose(first: Plan, second: Plan) -> Plan:
    """One plan that does both."""
    made = {name: move for move in first.moves for name in move.targets}
    moves = []
    for move in second.moves:
        before = [made[name] for name in move.sources]
        if all(not each.operations for each in before):
            sources = tuple(name for each in before for name in each.sources)
            moves.append(dataclasses.replace(move, sources=sources))
            continue
        if len(before) > 1 or len(before[0].targets) > 1 or len(before[0].sources) > 1:
            raise InputError(f"{', '.join(move.targets)} is made of several tensors: port in steps")
        operations = shorten((*before[0].operations, *move.operations))
        moves.append(dataclasses.replace(move, sources=before[0].sources, operations=operations))
    return Plan(
        moves=tuple(moves),
        tied=first.tied,
        ignored={**first.ignored, **second.ignored},
        computed=second.computed,
        copies=second.copies,
    )


def shorten(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Without an operation and its inverse after it."""
    kept: list[Operation] = []
    for operation in operations:
        if kept and kept[-1].inverse() == operation:
            kept.pop()
        else:
            kept.append(operation)
    return tuple(kept)


def writer_for(
    model: Identified, destination: Path, to: Format, dtype: np.dtype | None
) -> Callable[[Mapping[str, Header]], Writer]:
    """The writer of the destination, but for headers."""
    files = model.checkpoint.companions
    if to in ("pt", "safetensors"):
        return file_writer(destination, to)
    if to == OWN:
        from jax_transformer.porting.formats import orbax_run  # Orbax takes seconds to import.

        return functools.partial(
            orbax_run.FolderWriter,
            destination,
            config=own_config(model),
            companions=files,
            buffers=buffer_names(model.config),
            originals=tuple(path for path in model.originals.values()),
        )
    values, original = config_for(model, to, dtype)
    # The file itself, copied over what would be written from its values.
    files = (*files, *([original] if original is not None else []))
    if to == "huggingface" and ORIGINALS[to] not in model.originals:
        files = (*files, *generation.missing(model))
    if to == "meta":
        return functools.partial(meta.FolderWriter, destination, config=values, companions=files)
    return functools.partial(huggingface.FolderWriter, destination, config=values, companions=files)


def file_writer(destination: Path, to: Format) -> Callable[[Mapping[str, Header]], Writer]:
    """The writer of one file of tensors."""
    writer = torch_file.FileWriter if to == "pt" else safetensors_file.FileWriter
    return functools.partial(writer, destination)


def own_config(model: Identified) -> dict[str, Any]:
    """The `config.json` of one of our directories."""
    values = model.checkpoint.config
    if model.checkpoint.format == OWN and "task" in values:
        return dict(values)
    own: dict[str, Any] = {"family": model.family.name, "model": model.config.to_dict()}
    if model.family is transformer.FAMILY:
        return {"task": "translation", **own}
    return {**own, generation.PART: generation.generation_values(model)}


def config_for(model: Identified, to: Format, dtype: np.dtype | None) -> tuple[Values, Path | None]:
    """The config of a folder of others, and the file that holds just that, if there is one.

    Raises:
        InputError: a setting that the family cannot express.
    """
    original = model.originals.get(ORIGINALS[to])
    before = None if original is None else read_json(original)
    values = write_config(layout(model.family, to), model.config, before)
    if model.checkpoint.config.get("task") == "language" and generation.is_own(model):
        ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
        values = values | ids
    if dtype is not None and to == "huggingface":
        name = "dtype" if "dtype" in values else "torch_dtype"
        values = values | {name: str(dtype)}
    return values, original if values == before else None


def lost(model: Identified, to: Format) -> tuple[str, ...]:
    """A word about what the config of a folder of others cannot say: a rate of dropout."""
    if to not in ("huggingface", "meta"):
        return ()
    table = layout(model.family, to)
    if read_config(table, config_for(model, to, None)[0]) == model.config:
        return ()
    return (f"the family {table.name} has no dropout in its config: that of the run is left out",)
