"""Known differences between losses and their gradients."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_transformer.verification.solve import tidied
from jax_transformer.verification.training.objective import Weighting
from jax_transformer.verification.training.remedy import Method, Remedy, Steps


def objective(kind: str, sentence: str, **changes: Any) -> Remedy:
    """The remedy of another cross-entropy."""

    def change(method: Method, steps: Steps) -> tuple[Method, str] | None:
        if method.ours.training.loss is not None:
            return None
        changed = dataclasses.replace(method.objective, **changes)
        return dataclasses.replace(method, objective=changed), sentence

    return Remedy(kind, change)


WEIGHTINGS: dict[Weighting, tuple[str, str]] = {
    "sentences": (
        "mean over sentences",
        "the loss is the mean over sentences of their means, which weighs the tokens of short ones "
        "more: divide the sum over all tokens by their number",
    ),
    "sum": ("sum over tokens", "the loss is the sum over tokens: divide it by their number"),
    "rows": (
        "sum over tokens",
        "the loss is the sum over tokens divided by the number of rows: divide it by the number of "
        "tokens",
    ),
    "places": (
        "padding in the mean",
        "the loss is divided by the number of places, padding too: divide it by the number of "
        "tokens that have a label",
    ),
}


def losses(steps: Steps) -> Iterator[Remedy]:
    """Other sums over the tokens, for the gradients or for the loss that is told, or both."""
    for weighting, (kind, sentence) in WEIGHTINGS.items():
        yield from weighted(kind, sentence, weighting)
    labels = steps[0].batch.labels
    rows = 1 if labels is None else len(labels)
    for parts in (each for each in range(2, rows + 1) if rows % each == 0):
        yield from weighted(
            "mean of micro-batches",
            f"the loss is the mean of the means of {parts} micro-batches, which weighs the tokens "
            f"of small ones more: add up sums, and divide by all tokens",
            "means of parts",
            parts=parts,
        )
        yield from weighted(
            "accumulation not divided",
            f"the means of {parts} micro-batches are added up: divide the sum over all tokens by "
            f"their number",
            "sums of means",
            parts=parts,
        )
    for steps_to, text in ((1, "later"), (-1, "earlier")):
        yield objective(
            "label shift",
            f"labels are a token {text} than ours: labels are shifted twice, or not at all",
            shift=steps_to,
        )
    yield objective(
        "padding in the loss",
        "padding is to be predicted, too: give it the ignored label",
        padding=True,
    )
    yield Remedy("label smoothing", other_smoothing)
    yield Remedy("gradient scale", other_scale)
    yield Remedy("untrained parameters", untrained_parts)


def weighted(kind: str, sentence: str, weighting: Weighting, **more: Any) -> Iterator[Remedy]:
    """Of the gradients and the loss that is told, or one of them."""
    yield objective(kind, sentence, weighting=weighting, reported=weighting, **more)
    yield objective(kind, f"{sentence} (of the gradients alone)", weighting=weighting, **more)
    yield objective(kind, f"{sentence} (in the report alone)", reported=weighting, **more)


def other_smoothing(method: Method, steps: Steps) -> tuple[Method, str] | None:
    """The loss is linear in the smoothing: solved for."""
    if method.ours.training.loss is not None:
        return None
    now = method.objective.smoothing
    without, full = (
        method.ours(steps[0], dataclasses.replace(method.objective, smoothing=value))[0]
        for value in (0.0, 1.0)
    )
    value = tidied((steps[0].loss - without) / (full - without), 1e-12)
    if not 0 <= value < 1:
        return None
    sentence = f"label smoothing is {value:.6g}, not {now:g}"
    size = method.ours.vocab_size(steps[0])
    if math.isclose(value * (size - 1), now * size, rel_tol=1e-9):
        sentence = f"label smoothing of {now:g} is spread over the other {size - 1} classes alone"
    changed = dataclasses.replace(method.objective, smoothing=value)
    return dataclasses.replace(method, objective=changed), sentence


def other_scale(method: Method, steps: Steps) -> tuple[Method, str] | None:
    """Gradients are a multiple of ours."""
    _, gradients = method.ours(steps[0], method.objective)
    theirs = steps[0].gradients
    ours = sum(float(np.vdot(g, g)) for g in gradients.values())
    both = sum(float(np.vdot(theirs[n], g)) for n, g in gradients.items() if n in theirs)
    if ours == 0 or both == 0:
        return None
    factor = tidied(both / ours, 1e-12 * abs(both / ours))
    changed = dataclasses.replace(method.objective, factor=method.objective.factor * factor)
    return dataclasses.replace(method, objective=changed), (
        f"gradients are {factor:.6g} times those of the loss: those of micro-batches or devices "
        f"are added where they are to be averaged, or divided twice"
    )


def untrained_parts(method: Method, steps: Steps) -> tuple[Method, str] | None:
    """Parameters, and rows of tables, that have a gradient in our side alone."""
    found: dict[tuple[str, int | None], str] = {}
    for step in steps:
        _, gradients = method.ours(step, method.objective)
        for name, gradient in gradients.items():
            theirs = step.gradients.get(name, np.zeros_like(gradient))
            if not theirs.any() and gradient.any():
                found[name, None] = f"{name} is not trained: it is a buffer there, or frozen"
            elif gradient.ndim == 2 and name.endswith("embedding"):
                for row in np.flatnonzero(gradient.any(axis=1) & ~theirs.any(axis=1)):
                    found[name, int(row)] = (
                        f"row {row} of {name} is not trained: padding_idx of the reference's "
                        f"embedding is an id that the batches have"
                    )
    if not found:
        return None
    changed = dataclasses.replace(method.objective, untrained=tuple(found))
    said = list(found.values())
    return dataclasses.replace(method, objective=changed), ", ".join(said[:3])
