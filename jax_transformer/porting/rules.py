"""A family as a table: ordered rules, source name pattern <-> target path : operations."""

import dataclasses
import re

from jax_transformer.porting.operations import Operation


@dataclasses.dataclass(frozen=True)
class Rule:
    """`source` becomes `target` through `operations`, in order.

    Both are dotted names in which `{name}` stands for one part of a name or for the rest of one,
    and `{name*}` for whatever there is, dots included, the same on both sides:
    `{stack}.layers.{layer}.norm1.weight`, `{path*}norm{number}.weight`.
    """

    source: str
    target: str
    operations: tuple[Operation, ...] = ()

    def match(self, name: str) -> str | None:
        """The target of the source tensor `name`; None if the rule is not about it."""
        return translate(self.source, self.target, name)

    def inverse(self) -> "Rule":
        """The rule of the way back."""
        undo = tuple(operation.inverse() for operation in reversed(self.operations))
        return Rule(self.target, self.source, undo)


@dataclasses.dataclass(frozen=True)
class Alias:
    """`source` is a second name of the source tensor `of` (tied tables): equal to it, bit for bit.

    It has no target of its own; on the way back it is written as a copy.
    """

    source: str
    of: str


def translate(pattern: str, replacement: str, name: str) -> str | None:
    """`replacement` with the parts that `pattern` finds in `name`; None where it does not match."""
    expression = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(pattern))
    expression = re.sub(r"\\\{(\w+)\\\*\\\}", r"(?P<\1>.*)", expression)
    found = re.fullmatch(expression, name)
    return None if found is None else replacement.replace("*}", "}").format(**found.groupdict())
