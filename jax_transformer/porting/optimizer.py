"""Adam's moments beside the weights: the plan of the weights, made to carry them too.

A moment is a mean of gradients, or of their squares, element by element: it moves as its weight
does where that changes places only. What is added to a weight is not added to its moments.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.operations import (
    AddConstant,
    Concatenate,
    Each,
    MergeHeads,
    Operation,
    Pad,
    Reshape,
    RopePairing,
    Shape,
    Slice,
    Split,
    SplitHeads,
    Stack,
    Transpose,
    Unstack,
)
from jax_transformer.porting.plan import Move, Plan

Kind = Literal["first", "second", "average"]
"""First and second moments, and the running average of the weights, if there is one."""

PREFIXES: Mapping[str, Mapping[Kind, str]] = {
    "pt": {"first": "exp_avg.", "second": "exp_avg_sq.", "average": "ema."},
    "orbax": {"first": "mu.", "second": "nu.", "average": "average."},
}
"""What goes before the name of a weight in plans and manifests, by format."""

MOVED = (
    Concatenate,
    MergeHeads,
    Reshape,
    RopePairing,
    Split,
    SplitHeads,
    Stack,
    Transpose,
    Unstack,
)
"""Operations that change the places of numbers alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Hyperparameters of Adam or AdamW."""

    b1: float
    b2: float
    eps: float
    weight_decay: float
    """Of matrices; other parameters have none."""
    learning_rate: float
    """Of the next update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamState:
    """The state of Adam in a checkpoint.

    Attributes:
        tensors: of each kind, by the names that the checkpoint has its weights under.
        updates: made so far.
        settings: its hyperparameters.
        notes: what a user should know of how it was read.
    """

    tensors: Mapping[Kind, Mapping[str, LazyTensor]]
    updates: int
    settings: AdamSettings
    notes: tuple[str, ...] = ()


def moment_operation(operation: Operation) -> Operation | None:
    """What is done to a moment where `operation` is done to its weight; None: nothing.

    Raises:
        InputError: an operation that nothing is known of.
    """
    if isinstance(operation, MOVED):
        return operation
    if isinstance(operation, AddConstant):
        return None
    if isinstance(operation, Pad | Slice):
        return dataclasses.replace(operation, value=0.0)
    if isinstance(operation, Each):
        return Each(tuple(moment_operations(chain) for chain in operation.chains))
    raise InputError(f"{operation} of a weight is not known of its moments: leave them behind")


def moment_operations(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """The chain of a moment, from that of its weight.

    Raises:
        InputError: as `moment_operation`.
    """
    return tuple(step for each in operations if (step := moment_operation(each)) is not None)


def with_moments(
    plan: Plan,
    weights: Mapping[str, LazyTensor],
    state: AdamState,
    *,
    source: str,
    target: str,
    buffers: Collection[str] = (),
) -> tuple[Plan, dict[str, LazyTensor]]:
    """The plan of weights and moments, and the tensors that it is for.

    Args:
        plan: of the weights.
        weights: of the source.
        state: of the source.
        source, target: formats, keys of `PREFIXES`.
        buffers: tensors that are not trained, in our names.

    Raises:
        InputError: a weight without moments, a moment of another shape than its weight, one that
            belongs to no weight, parts of one tensor in different dtypes; all in one line.
    """
    moves, tensors = list(plan.moves), dict(weights)
    trained = [move for move in plan.moves if not {*move.sources, *move.targets} & set(buffers)]
    problems: list[str] = []
    for kind, held in state.tensors.items():
        before, after = PREFIXES[source][kind], PREFIXES[target][kind]
        used: set[str] = set()
        for move in trained:
            names = [stand_in(plan, held, name) for name in move.sources]
            used.update(names)
            found = {before + name: held[name] for name in names if name in held}
            wrong = misfits(before, names, [weights[name].shape for name in move.sources], found)
            if not wrong:
                moves.append(carried(move, tuple(found.items()), after, kind))
                tensors |= found
            problems += wrong
        problems += [f"{before}{name} belongs to no weight" for name in held if name not in used]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"the optimizer does not fit the model: {'; '.join(problems[:5])}{more}")
    return dataclasses.replace(plan, moves=tuple(moves)), tensors


def stand_in(plan: Plan, held: Mapping[str, LazyTensor], name: str) -> str:
    """The name of a table, perhaps tied, under which `held` has what belongs to it."""
    seconds = (second for second, of in plan.tied.items() if of == name and second in held)
    return name if name in held else next(seconds, name)


def misfits(
    before: str, names: list[str], shapes: list[Shape], found: Mapping[str, LazyTensor]
) -> list[str]:
    """What is wrong with the moments of the weights of one move."""
    kind = before.removesuffix(".")
    problems = [f"{name} has no {kind}" for name in names if before + name not in found]
    problems += [
        f"{before}{name} is {list(found[before + name].shape)}, but its weight {list(shape)}"
        for name, shape in zip(names, shapes, strict=True)
        if before + name in found and found[before + name].shape != shape
    ]
    if len({tensor.dtype for tensor in found.values()}) > 1:
        problems.append(f"{before}{' + '.join(names)} are of different dtypes")
    return problems


def carried(move: Move, found: tuple[tuple[str, LazyTensor], ...], after: str, kind: Kind) -> Move:
    """The move of what belongs to the weights of `move`."""
    average = kind == "average"
    return Move(
        tuple(name for name, _ in found),
        tuple(after + name for name in move.targets),
        move.operations if average else moment_operations(move.operations),
        move.shapes,
        found[0][1].dtype,
    )
