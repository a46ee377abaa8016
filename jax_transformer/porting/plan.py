"""From rules and shapes to a plan, before any tensor is touched."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import Operation, Shape
from jax_transformer.porting.rules import Alias, Rule


@dataclasses.dataclass(frozen=True)
class Move:
    """One tensor's way."""

    source: str
    target: str
    operations: tuple[Operation, ...]


def make_plan(
    rules: Sequence[Rule | Alias], source: Mapping[str, Shape], target: Mapping[str, Shape]
) -> list[Move]:
    """The way of each source tensor to its target; the first rule that matches counts.

    Args:
        rules: the family's table.
        source, target: name -> shape of every tensor there is, and of every one wanted.

    Raises:
        InputError: a source tensor that no rule names, a target filled twice or never, a shape
            that does not fit; all problems in one line.
    """
    aliases = {rule.source for rule in rules if isinstance(rule, Alias)}
    moves: list[Move] = []
    problems: list[str] = []
    for name, shape in source.items():
        if name in aliases:
            continue
        move = find_move(rules, name)
        if move is None or move.target not in target:
            problems.append(f"{name} {list(shape)} has no place in the target")
            continue
        for operation in move.operations:
            shape = operation.shape(shape)
        if shape != target[move.target]:
            wanted = list(target[move.target])
            problems.append(f"{name} gives {list(shape)}, but {move.target} is {wanted}")
        moves.append(move)
    filled = [move.target for move in moves]
    problems += [f"{name} is filled twice" for name in target if filled.count(name) > 1]
    problems += [f"nothing fills {name}" for name in target if name not in filled]
    if problems:
        raise InputError(f"the tensors do not fit: {'; '.join(problems)}")
    return moves


def find_move(rules: Sequence[Rule | Alias], name: str) -> Move | None:
    """The move of the first rule that matches `name`."""
    for rule in rules:
        if isinstance(rule, Rule) and (target := rule.match(name)) is not None:
            return Move(name, target, rule.operations)
    return None


def convert(
    rules: Sequence[Rule | Alias], tensors: Mapping[str, np.ndarray], target: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """The target tensors, in the dtypes of the source.

    Raises:
        InputError: what `make_plan` raises; tied names that hold different tensors.
    """
    plan = make_plan(rules, {name: array.shape for name, array in tensors.items()}, target)
    for rule in rules:
        if isinstance(rule, Alias) and rule.source in tensors:
            first, second = tensors[rule.of], tensors[rule.source]
            if first.dtype != second.dtype or first.tobytes() != second.tobytes():
                raise InputError(
                    f"{rule.source} and {rule.of} are one table in this model but hold different "
                    f"numbers: port it as a model with untied tables"
                )
    converted = {}
    for move in plan:
        array = np.asarray(tensors[move.source])
        for operation in move.operations:
            array = operation.apply(array)
        converted[move.target] = array
    return converted


def convert_back(
    rules: Sequence[Rule | Alias], tensors: Mapping[str, np.ndarray], source: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """The inverse of `convert`: `source` names the shapes to be filled, aliases included.

    Raises:
        InputError: what `make_plan` raises.
    """
    inverse = [rule.inverse() for rule in rules if isinstance(rule, Rule)]
    aliases = {rule.source: rule.of for rule in rules if isinstance(rule, Alias)}
    wanted = {name: shape for name, shape in source.items() if name not in aliases}
    converted = convert(inverse, tensors, wanted)
    return converted | {
        name: converted[of].copy() for name, of in aliases.items() if name in source
    }
