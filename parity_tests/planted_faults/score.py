"""How many of the planted faults are caught, found in the right module, and named."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from rich.table import Table

from jax_transformer.models.parameters import cast_model
from jax_transformer.verification.decoding.compare import DecodingReport, compare_decoding
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.pairs import verify_pair
from jax_transformer.verification.training.trajectory import Trajectory, compare_training
from parity_tests.harness import unchecked
from parity_tests.planted_faults.all_faults import FAULTS
from parity_tests.planted_faults.fault import Fault, said
from parity_tests.planted_faults.models import (
    CONFIGS,
    TRAINED_AND_DECODED,
    correct,
    decoded,
    trained,
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What verification makes of one fault."""

    fault: Fault
    caught: bool
    diagnoses: tuple[Diagnosis, ...]

    @property
    def found(self) -> dict[str, set[str]]:
        """By module, what is named."""
        return {each.module: set(each.kinds) for each in self.diagnoses}

    @property
    def localized(self) -> bool:
        return self.found.keys() == self.fault.causes.keys()

    @property
    def named(self) -> bool:
        expected = self.fault.causes
        return self.localized and all(
            expected[each.module] in (set(each.kinds), *({also} for also in each.alternatives))
            for each in self.diagnoses
        )

    @property
    def wrongly_named(self) -> bool:
        """A cause is given, and it is another one."""
        expected = self.fault.causes
        return any(kinds - expected.get(module, set()) for module, kinds in self.found.items())


def compared(pair: Pair, task: str) -> Trajectory | DecodingReport:
    """Its training or its decoding, in float64."""
    model = cast_model(pair.ours, jnp.float64)
    options = {"models_differ": False, "progress": lambda message: None}
    if task == "training":
        return compare_training(pair, model, **options)
    return compare_decoding(pair, model, dtype=None, **options)


def verified(fault: Fault) -> Result:
    """What verification makes of a fault: of one in training or decoding that part alone, as the
    models are one function."""
    pair = fault.pair()
    if fault.task in ("training", "decoding"):
        with jax.enable_x64(True):
            part = compared(pair, fault.task)
        return Result(fault, not part.same, part.diagnoses)
    backward, most = fault.kind == "gradient", len(fault.causes)
    report = verify_pair(pair, dtype=None, backward=backward, most=most)
    return Result(fault, not report.same, report.causes)


@dataclasses.dataclass(frozen=True)
class Score:
    """Of all faults, and of the correct models."""

    results: tuple[Result, ...]
    false_alarms: tuple[str, ...]
    correct_models: int
    seconds: float

    def share(self, holds: Callable[[Result], bool], kinds: Sequence[str] = ()) -> float:
        """Of the faults, or of those of some kinds."""
        chosen = [r for r in self.results if not kinds or r.fault.kind in kinds]
        return sum(map(holds, chosen)) / len(chosen)

    @property
    def known_kinds(self) -> tuple[str, ...]:
        """Those of single faults in the catalogue."""
        return tuple(
            dict.fromkeys(
                r.fault.kind for r in self.results if r.fault.kind != "unknown" and single(r.fault)
            )
        )

    @property
    def named_kinds(self) -> float:
        """The share of these kinds that are named wherever they are."""
        kinds = self.known_kinds
        return sum(self.share(lambda r: r.named, (kind,)) == 1 for kind in kinds) / len(kinds)


def single(fault: Fault) -> bool:
    """Whether it is one fault alone."""
    return len(fault.causes) == 1 and " + " not in fault.kind


def evaluate(progress: Callable[[str], None] = lambda message: None) -> Score:
    """Plant every fault in turn, and verify every correct model."""
    start = time.perf_counter()
    with unchecked():
        results = []
        for fault in FAULTS:
            progress(fault.label)
            results.append(verified(fault))
        alarms = []
        for name in CONFIGS:
            progress(f"no fault in {name}")
            same = verify_pair(correct(name), backward=True).same
            if name in TRAINED_AND_DECODED:
                with jax.enable_x64(True):
                    pairs = {"training": trained(name), "decoding": decoded(name)}
                    parts = [compared(pair, task) for task, pair in pairs.items()]
                same = same and all(part.same for part in parts)
            if not same:
                alarms.append(name)
    seconds = time.perf_counter() - start
    return Score(tuple(results), tuple(alarms), len(CONFIGS), seconds)


def table(score: Score) -> Table:
    """A line for each kind, then the sums."""
    shown = Table(title="planted faults", title_justify="left")
    shown.add_column("kind")
    for column in ("faults", "caught", "localised", "named"):
        shown.add_column(column, justify="right")
    for name in dict.fromkeys(r.fault.name for r in score.results):
        chosen = [r for r in score.results if r.fault.name == name]
        shown.add_row(name, *counts(chosen))
    shown.add_section()
    shown.add_row("all", *counts(score.results))
    return shown


def counts(results: Sequence[Result]) -> list[str]:
    """Faults, caught, localised, named."""
    sums = [sum(getattr(r, name) for r in results) for name in ("caught", "localized", "named")]
    return [str(len(results)), *map(str, sums)]


def misses(score: Score) -> list[str]:
    """A line for each fault that is not found as it should be."""
    return [
        f"{r.fault.label}: {'caught' if r.caught else 'NOT CAUGHT'}, {said(r.found) or 'nowhere'}"
        for r in score.results
        if not (r.caught and r.localized and r.named)
    ]
