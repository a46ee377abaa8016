"""What a comparison found."""

import dataclasses

from jax_transformer.verification.compare import SAME_FUNCTION, Accuracy, Distributions
from jax_transformer.verification.decoding.compare import DecodingReport
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.histogram import Histogram
from jax_transformer.verification.training.trajectory import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was found."""

    parameters: tuple[int, int]
    """Numbers of scalars: ours, the reference's."""
    problems: tuple[str, ...]
    """Names, shapes and dtypes that do not correspond."""
    errors: dict[str, float]
    """Float64: relative error at each point, each module fed with the reference's values."""
    gradients: dict[str, float]
    """Likewise backwards, from the loss on; and of each parameter, under its name."""
    output_error: float
    """Float64: of the final output, each side by itself."""
    dtype: str | None
    """None: no narrow run was asked for."""
    accuracy: dict[str, Accuracy]
    """In `dtype`: the error of each side against float64 at each point, each side by itself."""
    distributions: Distributions | None
    """Of next tokens, where the output is logits."""
    diagnoses: tuple[Diagnosis, ...]
    """Of the modules that differ, in order."""
    histogram: Histogram | None = None
    """Of the tensor where the sides differ first, or where ours is the least accurate beside
    theirs."""
    trajectory: Trajectory | None = None
    """Of training both sides; None: that was not asked for."""
    decoding: DecodingReport | None = None
    """Of decoding on both sides; likewise."""

    @property
    def causes(self) -> tuple[Diagnosis, ...]:
        """All diagnoses: of modules, then of the training step and of decoding."""
        return self.diagnoses + tuple(each for part in self.parts for each in part.diagnoses)

    @property
    def parts(self) -> tuple[Trajectory | DecodingReport, ...]:
        """What else was asked for."""
        return tuple(part for part in (self.trajectory, self.decoding) if part is not None)

    @property
    def same(self) -> bool:
        """The same function, as accurately computed; where that was asked for, trained alike and
        decoded alike."""
        same = not self.problems and self.same_function and self.as_accurate
        return same and all(part.same for part in self.parts)

    @property
    def same_function(self) -> bool:
        """No difference in float64."""
        return self.output_error <= SAME_FUNCTION and not self.diagnoses

    @property
    def as_accurate(self) -> bool:
        """Our error is within what the reference's allows, at each point."""
        return all(each.passed for each in self.accuracy.values())

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.diagnoses:
            worst = self.diagnoses[0]
            where = f"`{worst.module}`" if worst.module else "the model itself"
            return f"different: {where}: {worst.sentence}"
        if self.problems:
            return f"different: {self.problems[0]}"
        if not self.same_function:
            return f"different: outputs are off by {self.output_error:.3g}, and no module is"
        for part in self.parts:
            if not part.same:
                return part.verdict
        if not self.as_accurate:
            name = max(self.accuracy, key=lambda point: self.accuracy[point].ratio)
            ratio = self.accuracy[name].ratio
            return f"the same function, but {name} is {ratio:.1f} times less accurate than theirs"
        found = ["the same function"]
        found += [] if self.dtype is None else [f"as accurate in {self.dtype}"]
        found += [part.verdict for part in self.parts]
        return ", ".join(found)
