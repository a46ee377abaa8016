"""From rules and headers to a plan, before any tensor is touched."""

import collections
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import ml_dtypes  # noqa: F401  makes bfloat16 and float8 dtypes of NumPy
import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import Operation, Shape, apply_all, shapes_of
from jax_transformer.porting.rules import Alias, Computed, Ignore, Names, Rule, bind

Table = Sequence[Rule | Alias | Ignore | Computed]

SUGGESTIONS = 20
"""Of how many names of each kind the nearest ones are looked for, which takes time."""


class HasHeader(Protocol):
    """What is known of a tensor before it is read: an array has it, and a tensor in a file."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


@dataclasses.dataclass(frozen=True)
class Header:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Move:
    """The way of one tensor, or of several that an operation joins or splits."""

    sources: Names
    targets: Names
    operations: tuple[Operation, ...]
    shapes: tuple[Shape, ...]
    """Of the targets."""
    dtype: np.dtype

    def apply(self, arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """The targets, from the arrays of the sources; of an iterator none is kept for longer than
        it is needed."""
        results = apply_all(self.operations, arrays)
        return dict(zip(self.targets, results, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each tensor goes.

    Attributes:
        moves: in the order of the source.
        tied: source name -> the source name that must hold the same bits.
        ignored: source name -> why nothing becomes of it.
        computed: target name -> why nothing fills it.
        copies: target name -> the target of which it is a second copy.
    """

    moves: tuple[Move, ...]
    tied: Mapping[str, str]
    ignored: Mapping[str, str]
    computed: Mapping[str, str]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def headers(self) -> dict[str, Header]:
        """Every tensor that will be written, in the order in which it will be."""
        return {
            name: Header(shape, move.dtype)
            for move in self.moves
            for target, shape in zip(move.targets, move.shapes, strict=True)
            for name in self.names(target)
        }

    def names(self, target: str) -> Names:
        """The names of the copies of a target, and its own."""
        return (*(name for name, of in self.copies.items() if of == target), target)


def make_plan(
    rules: Table, source: Mapping[str, HasHeader], target: Mapping[str, Shape] | None
) -> Plan:
    """The way of each source tensor to its target; the first rule that matches counts, of those
    that give what is wanted.

    Prefixes that wrappers put before names (`unwrap`) are seen through.

    Args:
        rules: the family's table.
        source: header of every tensor there is.
        target: shape of every tensor wanted; None: whatever the rules make of the source.

    Raises:
        InputError: a source tensor that no rule names, a target filled twice or never, a shape
            that does not fit, parts of different dtypes; all problems in one line, with the
            nearest names.
    """
    actual = unwrap(rules, source, target)
    tied = stand_ins(rules, actual)
    moves: dict[Names, Move] = {}
    ignored: dict[str, str] = {}
    lost: list[str] = []
    problems: list[str] = []
    done: set[str] = set(tied)
    for name in actual:
        if name in done:
            continue
        rule, match = find_rule(rules, name, target)
        if isinstance(rule, Ignore):
            ignored[actual[name]] = rule.reason
        elif rule is None or match is None or not has_all(target, match[1]):
            lost.append(name)
        else:
            sources, targets = match
            done.update(sources)
            absent = [part for part in sources if part not in actual]
            if absent:
                problems += [f"{join(targets)} needs {part}, which is not there" for part in absent]
                continue
            moves[sources] = Move(
                tuple(actual[part] for part in sources),
                targets,
                rule.operations,
                *result_of(rule, {part: source[actual[part]] for part in sources}, problems),
            )
            problems += misfits(moves[sources], sources, target or {})
    filled = [name for move in moves.values() for name in move.targets]
    once = set(filled)
    unfilled = [name for name in target or () if name not in once]
    computed = {name: reason for name in unfilled if (reason := reason_for(rules, name))}
    missing = [name for name in unfilled if name not in computed]
    problems += twice(filled)
    problems += describe_lost(rules, lost, missing, {n: source[actual[n]].shape for n in lost})
    problems += describe_missing(rules, missing, [actual[name] for name in lost])
    if problems:
        raise InputError(f"the tensors do not fit: {'; '.join(problems)}")
    return Plan(
        moves=tuple(moves.values()),
        tied={actual[name]: actual[of] for name, of in tied.items()},
        ignored=ignored,
        computed=computed,
    )


def make_plan_back(
    rules: Table,
    target: Mapping[str, HasHeader],
    source: Mapping[str, Shape] | None = None,
    *,
    aliases: bool = False,
) -> Plan:
    """The inverse of `make_plan`: how the source tensors are made of `target`.

    Args:
        rules: the family's table, as for `make_plan`.
        target: header of every tensor there is: the targets of the rules.
        source: shape of every tensor wanted, aliases included; None: whatever the rules make.
        aliases: without `source`, whether the second names of tied tables are written too.

    Raises:
        InputError: what `make_plan` raises.
    """
    inverse = [rule.inverse() for rule in rules if not isinstance(rule, Alias)]
    second = {rule.source: rule.of for rule in rules if isinstance(rule, Alias)}
    if source is None:
        plan = make_plan(inverse, target, None)
        wanted = second if aliases else {}
    else:
        plan = make_plan(inverse, target, {n: s for n, s in source.items() if n not in second})
        wanted = {name: of for name, of in second.items() if name in source}
    return dataclasses.replace(plan, copies=wanted)


def convert(
    rules: Table, tensors: Mapping[str, np.ndarray], target: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """The target tensors, in the dtypes of the source.

    Raises:
        InputError: what `make_plan` raises; tied names that hold different tensors.
    """
    return run(make_plan(rules, tensors, target), tensors)


def convert_back(
    rules: Table, tensors: Mapping[str, np.ndarray], source: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
    """The inverse of `convert`: `source` names the shapes to be filled, aliases included.

    Raises:
        InputError: what `make_plan` raises.
    """
    return run(make_plan_back(rules, tensors, source), tensors)


def run(plan: Plan, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the plan makes of tensors in memory.

    Raises:
        InputError: tied names that hold different tensors.
    """
    for name, of in plan.tied.items():
        check_tied(name, tensors[name], of, tensors[of])
    converted = {}
    for move in plan.moves:
        results = move.apply(np.asarray(tensors[name]) for name in move.sources)
        for target, array in results.items():
            *copies, name = plan.names(target)
            converted[name] = array
            converted.update({copy: array.copy() for copy in copies})
    return converted


def check_tied(name: str, array: np.ndarray, of: str, other: np.ndarray) -> None:
    """Two names of one table must hold the same bits.

    Raises:
        InputError: they do not.
    """
    same = array.dtype == other.dtype and array.shape == other.shape
    if not same or not np.array_equal(bits(array), bits(other)):
        raise InputError(
            f"{name} and {of} are one table in this model but hold different numbers: port it as "
            f"a model with untied tables"
        )


def bits(array: np.ndarray) -> np.ndarray:
    """The bytes of a tensor, NaNs and all, without a copy if it is contiguous."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)


def stand_ins(rules: Table, actual: dict[str, str]) -> dict[str, str]:
    """Alias -> the name it is an alias of, for those in the file. Where the file lacks that name,
    the first alias there is stands in for it, and `actual` says so."""
    tied: dict[str, str] = {}
    for rule in rules:
        if isinstance(rule, Alias) and rule.source in actual:
            if rule.of in actual:
                tied[rule.source] = rule.of
            else:
                actual[rule.of] = actual.pop(rule.source)
    return tied


def find_rule(
    rules: Table, name: str, target: Mapping[str, Shape] | None
) -> tuple[Rule | Ignore | None, tuple[Names, Names] | None]:
    """The first rule about `name` that gives what is wanted, and what it matches; where none does,
    the first about it. (On the way back, several rules may name one tensor: spellings of it.)"""
    unwanted: tuple[Rule | None, tuple[Names, Names] | None] = (None, None)
    for rule in rules:
        if isinstance(rule, Rule) and (match := rule.match(name)) is not None:
            if has_all(target, match[1]):
                return rule, match
            unwanted = unwanted if unwanted[0] else (rule, match)
        if isinstance(rule, Ignore) and bind(rule.source, name) is not None:
            return (rule, None) if unwanted[0] is None else unwanted
    return unwanted


def reason_for(rules: Table, name: str) -> str | None:
    """Why nothing has to fill the target `name`."""
    reasons = (
        r.reason for r in rules if isinstance(r, Computed) and bind(r.target, name) is not None
    )
    return next(reasons, None)


def has_all(target: Mapping[str, Shape] | None, names: Names) -> bool:
    """Whether all names are wanted."""
    return target is None or all(name in target for name in names)


def result_of(
    rule: Rule, headers: Mapping[str, HasHeader], problems: list[str]
) -> tuple[tuple[Shape, ...], np.dtype]:
    """The shapes that a rule gives, and the dtype; what is wrong is added to `problems`."""
    dtypes = {name: np.dtype(header.dtype) for name, header in headers.items()}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        problems.append(f"parts of one tensor in different dtypes: {found}")
    try:
        shapes = shapes_of(rule.operations, [tuple(h.shape) for h in headers.values()])
    except InputError as error:
        problems.append(f"{join(headers)}: {error}")
        shapes = ()
    if shapes and len(shapes) != len(rule.targets):
        raise ValueError(f"{rule} gives {len(shapes)} tensors")
    return shapes, next(iter(dtypes.values()))


def misfits(move: Move, sources: Names, target: Mapping[str, Shape]) -> Iterator[str]:
    """Results whose shapes are not those wanted."""
    for name, shape in zip(move.targets, move.shapes, strict=False):
        if name in target and tuple(target[name]) != tuple(shape):
            wanted = list(target[name])
            yield f"{join(sources)} gives {list(shape)}, but {name} is {wanted}"


def twice(filled: list[str]) -> list[str]:
    """Names that are there more than once."""
    again = (name for name, count in collections.Counter(filled).items() if count > 1)
    return [f"{name} is filled twice" for name in again]


def describe_lost(
    rules: Table, lost: list[str], missing: list[str], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    """Source tensors without a place, with the nearest names that would have one."""
    wanted = list(dict.fromkeys(part for name in missing for part in sources_of(rules, name)))
    for count, name in enumerate(lost):
        hint = nearest(name, wanted) if count < SUGGESTIONS else ""
        yield f"{name} {list(shapes[name])} has no place in the target{hint}"


def describe_missing(rules: Table, missing: list[str], lost: list[str]) -> Iterator[str]:
    """Targets that nothing fills, with the nearest names that are there."""
    for count, name in enumerate(missing):
        origin = sources_of(rules, name)
        made_of = f" (made of {join(origin)})" if origin else ""
        near = nearest(origin[0], lost) if origin and count < SUGGESTIONS else ""
        yield f"nothing fills {name}{made_of}{near}"


def sources_of(rules: Table, target: str) -> Names:
    """The names of which the first rule that gives `target` makes it."""
    for rule in rules:
        if isinstance(rule, Rule) and (match := rule.inverse().match(target)) is not None:
            return match[1]
    return ()


def nearest(name: str, names: list[str]) -> str:
    """The name most like `name`, as a hint."""
    close = difflib.get_close_matches(name, names, n=1)
    return f", did you mean {close[0]}" if close else ""


def join(names: Iterable[str]) -> str:
    """Several names in a message."""
    return " + ".join(names)


WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and trainers put before every name."""

INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile and FSDP put within names."""


def unwrap(
    rules: Table, names: Iterable[str], target: Mapping[str, Shape] | None
) -> dict[str, str]:
    """Name without what wrappers added -> name in the file, in the variant that the rules know the
    most names of: as they are, without what is put within them, without each prefix in turn.

    Raises:
        InputError: two names become one.
    """
    names = list(names)

    def known(name: str) -> bool:
        rule, match = find_rule(rules, name, target)
        return isinstance(rule, Ignore) or (match is not None and has_all(target, match[1]))

    best, most = names, -1
    for variant in variants(names):
        count = sum(known(name) for name in variant)
        if count > most:
            best, most = variant, count
        if count == len(names):
            break
    plain = dict(zip(best, names, strict=True))
    if len(plain) != len(names):
        clash = next(name for name, of in zip(best, names, strict=True) if plain[name] != of)
        raise InputError(f"two tensors are called {clash} once the prefixes of wrappers are gone")
    return plain


def variants(names: list[str]) -> Iterator[list[str]]:
    """The names with fewer and fewer wrappers."""
    yield names
    for inside in INSIDE:
        names = [name.replace(inside, "") for name in names]
    yield names
    while common := next(
        (w for w in WRAPPERS if names and all(n.startswith(w) for n in names)), ""
    ):
        names = [name.removeprefix(common) for name in names]
        yield names
