"""A known difference between training steps, as a change to a method of ours.

A remedy sees the steps of the reference, for values that can be solved for: it changes the method
into the one under which the steps may agree, or gives None where it says nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax_transformer.verification.training.formula import Formula
from jax_transformer.verification.training.objective import Objective, OurObjective
from jax_transformer.verification.training.recorded import Step

Steps = Sequence[Step]


@dataclasses.dataclass(frozen=True)
class Method:
    """How a step is made, from the loss to the parameters."""

    formula: Formula
    objective: Objective
    ours: OurObjective


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change under which the steps may agree."""

    kind: str
    """The name of the catalogue's entry."""
    change: Callable[[Method, Steps], tuple[Method, str] | None]
    """The other method, and what it means: it follows "agrees when"."""
