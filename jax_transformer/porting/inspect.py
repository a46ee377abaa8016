"""`jax-transformer inspect`: what a file or folder of weights holds, from its headers alone."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jax_transformer.porting.formats.base import Checkpoint, LazyTensor
from jax_transformer.porting.plan import Plan
from jax_transformer.porting.recognise import family_of, open_checkpoint
from jax_transformer.porting.stream import cast_dtype

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
LONGEST = 60
"""Characters of a value of the config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a checkpoint holds: format, family, config, tensors."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A run, a ported directory, a Hugging Face or Meta folder, a file of safetensors, PyTorch or
    GGUF."""
    every: bool = False
    """A line for each tensor, not for each kind of one."""


def inspect(options: Inspect) -> None:
    """Print the tables.

    Raises:
        InputError: no format that is known, or files that are not as it has them.
    """
    checkpoint = open_checkpoint(options.path)
    console = Console(highlight=False)
    console.print(summary(checkpoint), soft_wrap=True, markup=False)
    if checkpoint.config:
        console.print(config_table(checkpoint.config))
    console.print(tensor_table(checkpoint.tensors, every=options.every))


def summary(checkpoint: Checkpoint) -> str:
    """What it is and how large, in a few lines."""
    tensors = checkpoint.tensors.values()
    elements = sum(elements_of(tensor) for tensor in tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    dtypes = dict.fromkeys(described(tensor) for tensor in tensors)
    lines = [
        f"{checkpoint.path}",
        f"format {checkpoint.format}, family {family_of(checkpoint) or 'unknown'}",
        f"{len(tensors):,} tensors, {elements:,} numbers, {nbytes:,} bytes once read: "
        f"{', '.join(dtypes)}",
    ]
    if checkpoint.companions:
        lines.append("with " + ", ".join(path.name for path in checkpoint.companions))
    rest = {name: value for name, value in checkpoint.metadata.items() if value}
    if rest:
        lines.append("also " + ", ".join(f"{n} {shorten(value)}" for n, value in rest.items()))
    return "\n".join(lines)


def config_table(config: Mapping[str, Any]) -> Table:
    """Every field, long ones shortened."""
    table = Table("field", "value", title="config", title_justify="left")
    for name, value in config.items():
        table.add_row(name, shorten(value))
    return table


def tensor_table(tensors: Mapping[str, LazyTensor], *, every: bool) -> Table:
    """A line for each tensor, or for those of one header whose names differ in numbers only."""
    table = Table(title="tensors", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, tensor in tensors.items():
        key = name if every else NUMBER.sub("#", name)
        groups.setdefault((key, tensor.shape, described(tensor)), []).append(name)
    for (_, shape, dtype), names in groups.items():
        nbytes = sum(tensors[name].nbytes for name in names)
        table.add_row(common(names), str(len(names)), str(list(shape)), dtype, f"{nbytes:,}")
    return table


def plan_table(plan: Plan, dtype: np.dtype | None = None) -> Table:
    """Where each tensor goes, floats perhaps in another dtype: what a dry run shows."""
    table = Table(title="plan", title_justify="left")
    for column in ("source", "target", "operations"):
        table.add_column(column, overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    for move in plan.moves:
        to = cast_dtype(move.dtype, dtype)
        steps = [*map(repr, move.operations), *([f"cast({to})"] if to != move.dtype else [])]
        operations = ", ".join(steps) or "as it is"
        shapes = "\n".join(str(list(shape)) for shape in move.shapes)
        targets = (name for target in move.targets for name in reversed(plan.names(target)))
        table.add_row("\n".join(move.sources), "\n".join(targets), operations, shapes, str(to))
    for name, of in plan.tied.items():
        table.add_row(name, "", f"the same as {of}", "", "")
    for name, reason in plan.ignored.items():
        table.add_row(name, "", f"ignored: {reason}", "", "")
    for name, reason in plan.computed.items():
        table.add_row("", name, f"computed: {reason}", "", "")
    return table


def common(names: list[str]) -> str:
    """`layers.0-5.weight` for names that differ in numbers only."""
    positions = zip(*(NUMBER.findall(name) for name in names), strict=True)
    ranges = iter([span(sorted({int(number) for number in column})) for column in positions])
    return NUMBER.sub(lambda _: next(ranges), names[0])


def span(numbers: list[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def described(tensor: LazyTensor) -> str:
    """The dtype, and how the file has it if not so."""
    return f"{tensor.dtype} from {tensor.stored}" if tensor.stored else str(tensor.dtype)


def elements_of(tensor: LazyTensor) -> int:
    """The number of elements."""
    return tensor.nbytes // tensor.dtype.itemsize


def shorten(value: Any) -> str:
    """A value in one line: a long list by its length."""
    if isinstance(value, Mapping) and any(isinstance(each, LazyTensor) for each in value.values()):
        return f"of {len(value):,} tensors"
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        value = list(value)
        if len(value) > 8:
            return f"{len(value):,} values: {', '.join(repr(each) for each in value[:3])}, ..."
    text = repr(value) if not isinstance(value, str) else value
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
