"""Why a module differs: known differences are applied to it until one makes it agree.

An entry of the catalogue (`verification.catalogue`) yields *remedies* for a module: each changes a
copy of it, or what it is called with, and says what that means. The cause is the remedy under which
the module gives what the reference gave from the same inputs.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from flax import nnx

from jax_transformer.verification.capture import Record, module_of
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.localize import FedCall, compare_forward


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


Entry = Callable[[Any, FedCall, "Weights"], Iterator[Remedy]]
"""Remedies for a module (an entry yields none for modules that it knows nothing of)."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where else in the models weights may have come from."""

    ours: dict[str, np.ndarray]
    """Parameters of our side, by name."""
    theirs: dict[str, np.ndarray]
    """The reference's, under our names, where they are known."""
    module: str
    """The name of the module in question."""

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


def diagnose(
    point: str,
    error: float,
    name: str,
    call: FedCall,
    reference: Record,
    weights: Weights,
    catalogue: Sequence[Entry],
    excused: Collection[str] = (),
    valid: np.ndarray | None = None,
) -> Diagnosis:
    """The cause of the difference at `point`, in the call `name` of the module that computed it.

    First each remedy alone, then two at once.

    Args:
        excused: points that may go on to differ: those that modules inside compute, wrongly.
    """
    remedies = [remedy for entry in catalogue for remedy in entry(call.module, call, weights)]
    pairs = itertools.islice(differing(itertools.combinations(remedies, 2)), MOST_PAIRS)
    for chosen in itertools.chain(((remedy,) for remedy in remedies), pairs):
        if agrees(chosen, point, name, call, reference, excused, valid):
            sentence = " and ".join(remedy.sentence for remedy in chosen)
            kinds = tuple(remedy.kind for remedy in chosen)
            return Diagnosis(module_of(f"{name}:"), point, error, kinds, f"agrees when {sentence}")
    return Diagnosis(module_of(f"{name}:"), point, error, (), "differs from an unknown cause")


MOST_PAIRS = 400
"""Pairs of remedies that are tried."""


def differing(pairs: Iterator[tuple[Remedy, Remedy]]) -> Iterator[tuple[Remedy, Remedy]]:
    """Pairs from two entries: two remedies of one exclude each other."""
    return ((one, two) for one, two in pairs if one.kind != two.kind)


def agrees(
    remedies: Sequence[Remedy],
    point: str,
    name: str,
    call: FedCall,
    reference: Record,
    excused: Collection[str],
    valid: np.ndarray | None,
) -> bool:
    """Whether the module gives the reference's values at `point`, and at all others up to its
    own output but those `excused`, when the remedies are applied."""
    trial = Trial(nnx.clone(call.module), call.args, dict(call.kwargs))
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
                place=name,
            )
    except (TypeError, ValueError, AttributeError):  # the remedy does not fit this module
        return False
    errors = comparison.errors
    return point in errors and all(
        error <= SAME_FUNCTION for each, error in errors.items() if each not in excused
    )
