"""A family as a table: ordered rules, source name pattern <-> target path : operations."""

import dataclasses
import functools
import re

from jax_transformer.porting.operations import Operation, invert

Patterns = str | tuple[str, ...]
Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """`source` becomes `target` through `operations`, in order.

    Both are dotted names in which `{name}` stands for one part of a name or for the rest of one,
    and `{name*}` for whatever there is, dots included, the same on both sides:
    `{stack}.layers.{layer}.norm1.weight`, `{path*}norm{number}.weight`.

    Either may be several names, for an operation that takes or gives several tensors, in its order:

        Rule("h.{layer}.attn.c_attn.weight",
             ("layers.{layer}.q.kernel", "layers.{layer}.k.kernel", "layers.{layer}.v.kernel"),
             (Split((d, d, d), axis=1),))

    Raises:
        ValueError: the names do not all have the same parts in braces.
    """

    source: Patterns
    target: Patterns
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        parts = {frozenset(PART.findall(p)) for p in (*self.sources, *self.targets)}
        if len(parts) != 1:
            raise ValueError(f"the names of {self} have different parts in braces")

    @property
    def sources(self) -> Names:
        """The patterns on the left."""
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def targets(self) -> Names:
        """The patterns on the right."""
        return (self.target,) if isinstance(self.target, str) else self.target

    def match(self, name: str) -> tuple[Names, Names] | None:
        """All sources and targets of the rule where `name` is one of the sources; None if the rule
        is not about it."""
        for pattern in self.sources:
            if (parts := bind(pattern, name)) is not None:
                return (
                    tuple(fill(source, parts) for source in self.sources),
                    tuple(fill(target, parts) for target in self.targets),
                )
        return None

    def inverse(self) -> "Rule":
        """The rule of the way back."""
        return Rule(self.target, self.source, invert(self.operations))


@dataclasses.dataclass(frozen=True)
class Alias:
    """`source` is a second name of the source tensor `of` (tied tables): equal to it, bit for bit.

    It has no target of its own; on the way back it is written as a copy if it is asked for. A file
    that holds only the second name is as good as one that holds the first.
    """

    source: str
    of: str


@dataclasses.dataclass(frozen=True)
class Ignore:
    """Source tensors that hold no weights (buffers that the config determines), and why they are
    left where they are. On the way back nothing is written under these names."""

    source: str
    reason: str

    def inverse(self) -> "Computed":
        """The rule of the way back."""
        return Computed(self.source, self.reason)


@dataclasses.dataclass(frozen=True)
class Computed:
    """Target tensors that no source fills, since the model makes them itself, and why."""

    target: str
    reason: str

    def inverse(self) -> Ignore:
        """The rule of the way back."""
        return Ignore(self.target, self.reason)


Rules = tuple[Rule | Alias | Ignore | Computed, ...]

PART = re.compile(r"\{(\w+)\*?\}")


def numbered(pattern: str, index: str, count: int) -> Names:
    """`pattern` once for each number in place of `{index}`: the sources of a `Stack`."""
    return tuple(pattern.replace(f"{{{index}}}", str(number)) for number in range(count))


@functools.cache
def expression(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern."""
    part = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(pattern))
    return re.compile(re.sub(r"\\\{(\w+)\\\*\\\}", r"(?P<\1>.*)", part))


def bind(pattern: str, name: str) -> dict[str, str] | None:
    """The parts of `name` that the braces of `pattern` stand for; None where it does not match."""
    found = expression(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


def fill(pattern: str, parts: dict[str, str]) -> str:
    """`pattern` with those parts."""
    return PART.sub(lambda part: parts[part[1]], pattern)


def translate(pattern: str, replacement: str, name: str) -> str | None:
    """`replacement` with the parts that `pattern` finds in `name`; None where it does not match."""
    parts = bind(pattern, name)
    return None if parts is None else fill(replacement, parts)
