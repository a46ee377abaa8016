"""Why a training step differs: each part of it is fed with what the reference has there.

The parts are the loss and its gradients (at the reference's parameters), the clipping (of its
gradients), the moments (of what its optimizer was given) and the update (of its moments): none
depends on a fault in one before it, nor on the steps before. A cause is a remedy under which a part
gives, at each of the steps, what the reference gave.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flax import nnx

from jax_transformer.verification.compare import SAME_FUNCTION, relative_error
from jax_transformer.verification.diagnose import Diagnosis
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.training import losses, optimizers
from jax_transformer.verification.training.formula import Formula
from jax_transformer.verification.training.objective import Objective, OurObjective
from jax_transformer.verification.training.recorded import Step, Tensors, norm_of
from jax_transformer.verification.training.remedy import Method, Remedy, Steps

SMALL = 1e-4
"""A gradient whose norm is below this fraction of that of all is held against the latter: a key
bias has none but rounding errors."""

Errors = Callable[[Method, Step], dict[str, float]]
"""Relative errors of a part of a step, by what is compared; up to `SAME_FUNCTION` it agrees."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a training step."""

    name: str
    errors: Errors
    remedies: Callable[[Steps], Iterator[Remedy]]


def explain_steps(
    model: nnx.Module, pair: Pair, steps: Steps, *, models_differ: bool
) -> list[Diagnosis]:
    """The cause of each part that differs, in order.

    Args:
        model: our side in float64.
        pair: with the training of both.
        steps: of the reference.
        models_differ: then the loss does, too, and is left out.
    """
    training = pair.training
    assert training is not None
    last = max(step.number for step in steps)
    method = Method(
        Formula.of(training.recipe, last),
        Objective(smoothing=training.recipe.label_smoothing),
        OurObjective(model, training, pair.jax_call),
    )
    found = []
    for part in PARTS[1:] if models_differ else PARTS:
        place, error = worst(part, method, steps)
        if error <= SAME_FUNCTION:
            continue
        kinds, sentence, changed = cause(part, method, steps)
        # Later parts are to be as the cause has it: a decay in the gradient is none in the update.
        method = changed
        found.append(Diagnosis(part.name, place, error, kinds, sentence))
    return found


def worst(part: Part, method: Method, steps: Steps) -> tuple[str, float]:
    """Where a part differs first, and how much there."""
    for step in steps:
        errors = part.errors(method, step)
        name = max(errors, key=lambda name: errors[name])
        if not errors[name] <= SAME_FUNCTION:
            return f"step {step.number}, {name}", errors[name]
    return "", 0.0


def cause(part: Part, method: Method, steps: Steps) -> tuple[tuple[str, ...], str, Method]:
    """The remedies under which a part agrees, one or two; or none, and the method as it is."""
    # Values are solved for where the part differs.
    differing = [step for step in steps if worst(part, method, [step])[1] > SAME_FUNCTION]
    known = list(part.remedies(steps))
    pairs = (pair for pair in itertools.permutations(known, 2) if pair[0].kind != pair[1].kind)
    for chosen in itertools.chain(((remedy,) for remedy in known), pairs):
        changed, sentences = method, []
        for remedy in chosen:
            result = remedy.change(changed, differing)
            if result is None:
                break
            changed, sentence = result
            sentences.append(sentence)
        if len(sentences) == len(chosen) and worst(part, changed, steps)[1] <= SAME_FUNCTION:
            kinds = tuple(remedy.kind for remedy in chosen)
            return kinds, f"agrees when {' and '.join(sentences)}", changed
    return (), "differs from an unknown cause", method


def loss_errors(method: Method, step: Step) -> dict[str, float]:
    """Of the loss, and of its gradients, at the reference's parameters."""
    loss, gradients = method.ours(step, method.objective)
    errors = {"loss": relative_error(np.asarray(loss), np.asarray(step.loss))}
    whole = SMALL * step.gradient_norm
    norm = np.asarray(norm_of(gradients))
    errors["gradient norm"] = relative_error(norm, np.asarray(step.gradient_norm))
    for name, gradient in gradients.items():
        if name in step.gradients:
            errors[f"gradient of {name}"] = difference(gradient, step.gradients[name], whole)
    return errors


def difference(found: np.ndarray, expected: np.ndarray, least: float) -> float:
    """`|found - expected| / max(|expected|, least)`."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    size = max(float(np.linalg.norm(expected)), least)
    distance = float(np.linalg.norm(found - expected))
    return distance / size if size else (0.0 if distance == 0 else np.inf)


def clip_errors(method: Method, step: Step) -> dict[str, float]:
    """Of what the optimizer is given."""
    return of_all("clipped gradient", method.formula.clipped(step.gradients), step.given)


def moment_errors(method: Method, step: Step) -> dict[str, float]:
    """Of both moments."""
    first, second = method.formula.moments(step.given, step.before)
    return of_all("first moment", first, step.after.first) | of_all(
        "second moment", second, step.after.second
    )


def of_all(what: str, found: Tensors, expected: Tensors) -> dict[str, float]:
    """By name, of what both have."""
    return {
        f"{what} of {name}": difference(value, expected[name], 0.0)
        for name, value in found.items()
        if name in expected
    }


def update_errors(method: Method, step: Step) -> dict[str, float]:
    """Of what is taken from the parameters, but for what rounding leaves of it."""
    errors = {}
    for name in step.given:
        before, after = step.before.parameters[name], step.after.parameters[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = before - method.formula.taken(step, name) - after
        rounding = 4 * float(np.linalg.norm(np.spacing(np.abs(before))))
        size = float(np.linalg.norm(after - before))
        distance = float(np.linalg.norm(wrong))
        agrees = distance <= rounding + SAME_FUNCTION * size
        off = distance / size if size and np.isfinite(distance) else np.inf
        errors[f"update of {name}"] = 0.0 if agrees else off
    return errors


PARTS: Sequence[Part] = (
    Part("loss", loss_errors, losses.losses),
    Part("clipping", clip_errors, optimizers.clipping),
    Part("optimizer, moments", moment_errors, optimizers.moments),
    Part("optimizer, update", update_errors, optimizers.updates),
)
