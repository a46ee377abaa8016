"""A fault, and what is to be said of it."""

import dataclasses
from typing import Literal

from jax_transformer.verification.pair import Pair
from parity_tests.planted_faults.models import correct, decoded, trained, whole
from parity_tests.planted_faults.plant import Plant

PAIRS = {"forward": correct, "training": trained, "decoding": decoded, "all": whole}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A small change to a correct pair, with the module and the cause to be named."""

    kind: str
    """Of the diagnosis, several of one module with " + " between them; "unknown": none may be
    named; "gradient": in the derivative only."""
    model: str
    module: str
    """Or the part of a training step, or the way of decoding."""
    plant: Plant
    task: Literal["forward", "training", "decoding", "all"] = "forward"
    """What has to be compared for it to show."""
    also: tuple[tuple[str, str], ...] = ()
    """Module and kind of further faults in other modules."""

    @property
    def causes(self) -> dict[str, set[str]]:
        """By module, what is to be named."""
        named = {self.module: self.kind} | dict(self.also)
        return {
            module: set() if kind == "unknown" else set(kind.split(" + "))
            for module, kind in named.items()
        }

    @property
    def name(self) -> str:
        """All that is to be named."""
        return ", ".join((self.kind, *(kind for _, kind in self.also)))

    @property
    def label(self) -> str:
        causes = [
            f"{' + '.join(sorted(k)) or 'unknown'} in {m or 'the model'}"
            for m, k in self.causes.items()
        ]
        return f"{self.model}: {' and '.join(causes)}"

    def pair(self) -> Pair:
        """With the fault."""
        return self.plant(PAIRS[self.task](self.model))


def said(causes: dict[str, set[str]]) -> str:
    """Modules and what is wrong with them."""
    return " and ".join(
        f"{' + '.join(sorted(kinds)) or 'unknown'} in {module or 'the model'}"
        for module, kinds in causes.items()
    )
