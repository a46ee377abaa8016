"""Why a module differs: known differences are applied to it until one makes it agree.

An entry of the catalogue (`verification.catalogue`) yields *remedies* for a module: each changes a
copy of it, or what it is called with, and says what that means. The cause is the remedy under which
the module gives what the reference gave from the same inputs.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from flax import nnx

from jax_transformer.verification.capture import Record, module_of
from jax_transformer.verification.localize import Disagreement, FedCall, compare_forward


@dataclasses.dataclass
class Trial:
    """A copy of the module and its call, for a remedy to change."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    patches: list[tuple[Any, str, Any]] = dataclasses.field(default_factory=list)
    """What to put in place of functions that have no setting: (owner, name, replacement)."""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change under which the module may agree."""

    kind: str
    """The name of the catalogue's entry."""
    sentence: str
    """What is wrong and what to do: it follows "`module`: agrees when"."""
    change: Callable[[Trial], None]


Entry = Callable[[Any, FedCall, "Evidence"], Iterator[Remedy]]
"""Remedies for a module (an entry yields none for modules that it knows nothing of)."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What else is known: where weights may have come from, and what the module should give."""

    ours: dict[str, np.ndarray]
    """Parameters of our side, by name."""
    theirs: dict[str, np.ndarray]
    """The reference's, under our names, where they are known."""
    module: str
    """The name of the module in question."""
    output: np.ndarray | None = None
    """What the reference's module gave, if that is a point."""

    def sibling(self, name: str) -> np.ndarray | None:
        """Our parameter `name` of the module around this one: `k_proj.kernel`."""
        return self.ours.get(f"{self.module.rpartition('.')[0]}.{name}".lstrip("."))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a module."""

    module: str
    point: str
    error: float
    kinds: tuple[str, ...]
    """Names of the catalogue's entries; empty: the cause is unknown."""
    sentence: str
    alternatives: tuple[str, ...] = ()
    """Names of entries that, each alone, make it agree as well."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference to be explained."""

    point: str
    """The first in its call that differs."""
    error: float
    name: str
    """Of the call of the module that computed it."""
    call: FedCall
    differing: Collection[str]
    """All points that differ, in this call and elsewhere."""
    excused: Collection[str]
    """Those elsewhere, which modules inside this one may go on to compute wrongly."""


def diagnose(
    finding: Finding,
    reference: Record,
    evidence: Evidence,
    catalogue: Sequence[Entry],
    valid: np.ndarray | None = None,
) -> Diagnosis:
    """The cause of a difference: first each remedy alone is tried, then two at once.

    A remedy under which a point differs that did not is none, nor half of one.
    """
    call, module = finding.call, module_of(f"{finding.name}:")
    remedies = [remedy for entry in catalogue for remedy in entry(call.module, call, evidence)]
    harmless = []
    for index, remedy in enumerate(remedies):
        failing = first_failure([remedy], finding, reference, valid)
        if failing is None:
            others = equivalent(remedy, remedies[index + 1 :], finding, reference, valid)
            also = "".join(f", or as well when {other.sentence}" for other in others)
            return Diagnosis(
                module,
                finding.point,
                finding.error,
                (remedy.kind,),
                f"agrees when {remedy.sentence}{also}",
                tuple(other.kind for other in others),
            )
        if failing in finding.differing:
            harmless.append(remedy)
    for pair in itertools.islice(pairs_of(harmless), MOST_PAIRS):
        if first_failure(pair, finding, reference, valid) is None:
            sentence = " and ".join(remedy.sentence for remedy in pair)
            kinds = tuple(remedy.kind for remedy in pair)
            return Diagnosis(module, finding.point, finding.error, kinds, f"agrees when {sentence}")
    return Diagnosis(module, finding.point, finding.error, (), "differs from an unknown cause")


MOST_PAIRS = 400
"""Pairs of remedies that are tried."""


def pairs_of(remedies: Sequence[Remedy]) -> list[tuple[Remedy, Remedy]]:
    """Pairs from two entries (two remedies of one exclude each other), the first remedies of all
    entries before the further ones."""
    seen: collections.Counter[str] = collections.Counter()
    ranked = []
    for remedy in remedies:
        ranked.append((seen[remedy.kind], remedy))
        seen[remedy.kind] += 1
    pairs = [
        (rank + other_rank, (one, two))
        for (rank, one), (other_rank, two) in itertools.combinations(ranked, 2)
        if one.kind != two.kind
    ]
    return [pair for _, pair in sorted(pairs, key=lambda each: each[0])]


def equivalent(
    cause: Remedy,
    others: Sequence[Remedy],
    finding: Finding,
    reference: Record,
    valid: np.ndarray | None,
) -> list[Remedy]:
    """The first remedy of each other entry under which the module agrees, too: on any inputs the
    two may be one, or on these alone."""
    firsts = {other.kind: other for other in reversed(others) if other.kind != cause.kind}
    return [
        other
        for other in reversed(firsts.values())
        if first_failure([other], finding, reference, valid) is None
    ]


NOT_FITTING = ""
"""In place of a point: the remedy cannot be applied."""


def first_failure(
    remedies: Sequence[Remedy], finding: Finding, reference: Record, valid: np.ndarray | None
) -> str | None:
    """The first point at which the module differs from the reference when the remedies are applied,
    up to its own output, but for those excused; None if there is none."""
    trial = Trial(nnx.clone(finding.call.module), finding.call.args, dict(finding.call.kwargs))
    try:
        for remedy in remedies:
            remedy.change(trial)
        with contextlib.ExitStack() as stack:
            for owner, attribute, replacement in trial.patches:
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
            _, comparison = compare_forward(
                trial.module,
                lambda module: module(*trial.args, **trial.kwargs),
                reference,
                valid,
                place=finding.name,
                excused=finding.excused,
            )
    except Disagreement as error:
        return error.point
    except (TypeError, ValueError, AttributeError):  # the remedy does not fit this module
        return NOT_FITTING
    return None if finding.point in comparison.errors else NOT_FITTING
