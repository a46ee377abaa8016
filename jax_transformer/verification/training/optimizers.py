"""Known differences between optimizers: clipping, moments, updates."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_transformer.verification.solve import tidied
from jax_transformer.verification.training.formula import Formula
from jax_transformer.verification.training.recorded import Step, norm_of
from jax_transformer.verification.training.remedy import Method, Remedy, Steps


def formula(kind: str, sentence: str, **changes: Any) -> Remedy:
    """The remedy of other settings of the optimizer."""

    def change(method: Method, steps: Steps) -> tuple[Method, str]:
        changed = dataclasses.replace(method.formula, **changes)
        return dataclasses.replace(method, formula=changed), sentence

    return Remedy(kind, change)


def solved(
    kind: str, solve: Callable[[Method, Steps], tuple[dict[str, Any], str] | None]
) -> Remedy:
    """The remedy of settings of the optimizer that follow from the steps."""

    def change(method: Method, steps: Steps) -> tuple[Method, str] | None:
        found = solve(method, steps)
        if found is None:
            return None
        changed = dataclasses.replace(method.formula, **found[0])
        return dataclasses.replace(method, formula=changed), found[1]

    return Remedy(kind, change)


def clipping(steps: Steps) -> Iterator[Remedy]:
    """No clipping, at another norm, by tensor or by value."""
    yield formula("no clipping", "gradients are not clipped: clip them", max_norm=None)
    yield formula(
        "clip epsilon",
        "gradients are multiplied by max_norm / norm: PyTorch adds 1e-6 to the norm",
        clip_epsilon=0.0,
    )
    yield solved("clip norm", other_norm)
    yield formula(
        "clip each",
        "each tensor is clipped by its own norm: clip by the norm of all gradients together",
        clip="each",
    )
    yield formula(
        "clip values",
        "gradients are clipped value by value: clip by the norm of all together",
        clip="values",
    )


def other_norm(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """From a step that clips."""
    for step in steps:
        factor = norm_of(step.given) / step.gradient_norm if step.gradient_norm else 1.0
        if factor < 1 - 1e-12:
            limit = factor * (step.gradient_norm + method.formula.clip_epsilon)
            limit = tidied(limit, 1e-12 * limit)
            was = method.formula.max_norm
            return {"max_norm": limit}, f"gradients are clipped at {limit:.6g}, not at {was}"
    return None


def moments(steps: Steps) -> Iterator[Remedy]:
    """Other betas, or a decay that goes through the moments."""
    yield solved("Adam betas", other_betas)
    yield formula(
        "decay in the gradient",
        "the weight decay is added to the gradient (Adam with L2, not AdamW): use "
        "torch.optim.AdamW, or weight_decay=0",
        decay_in_gradient=True,
    )
    yield formula(
        "decay in the gradient",
        "the weight decay is added to the gradient (Adam with L2, not AdamW), of biases and norms, "
        "too: use torch.optim.AdamW on matrices",
        decay_in_gradient=True,
        decay_vectors=True,
    )


def other_betas(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """The moments are linear in the betas: solved for."""
    step, now = steps[0], method.formula
    found = {}
    for field, before, after, power in (
        ("b1", step.before.first, step.after.first, 1),
        ("b2", step.before.second, step.after.second, 2),
    ):
        gain = {name: before[name] - g**power for name, g in step.given.items()}
        size = sum(float(np.vdot(d, d)) for d in gain.values())
        both = sum(
            float(np.vdot(after[name] - step.given[name] ** power, d)) for name, d in gain.items()
        )
        found[field] = tidied(both / size, 1e-12) if size else getattr(now, field)
    sentence = f"betas are {found['b1']:.6g} and {found['b2']:.6g}, not {now.b1:g} and {now.b2:g}"
    return found, sentence


def updates(steps: Steps) -> Iterator[Remedy]:
    """What is made of the moments."""
    yield formula(
        "epsilon in the root",
        "epsilon is added under the root: sqrt(v + eps), not sqrt(v) + eps",
        eps_in_root=True,
    )
    yield formula(
        "no bias correction",
        "the moments are not corrected for their start at zero: divide by 1 - beta^t",
        correct_first=False,
        correct_second=False,
    )
    yield formula(
        "no bias correction",
        "the second moment is not corrected for its start at zero: divide by 1 - b2^t",
        correct_second=False,
    )
    yield formula(
        "no bias correction",
        "the first moment is not corrected for its start at zero: divide by 1 - b1^t",
        correct_first=False,
    )
    yield formula(
        "decay on vectors",
        "biases and scales of norms decay, too: leave them out of the decay",
        decay_vectors=True,
    )
    yield formula(
        "decay without the rate",
        "the decay is not multiplied by the learning rate: PyTorch and optax multiply it",
        decay_by_rate=False,
    )
    yield solved("Adam epsilon", other_epsilon)
    yield solved("weight decay", other_decay)
    yield solved("schedule off by one", shifted_rates)
    yield solved("learning rate", other_rates)
    for vectors in (False, True):
        several = functools.partial(other_settings, vectors=vectors)
        yield solved("optimizer settings", several)


def removed(method: Method, step: Step, name: str) -> np.ndarray:
    """What a step took from a parameter, at the rate 1, but for the decay."""
    formula = method.formula
    before, after = (s.parameters[name] for s in (step.before, step.after))
    rate = formula.rates[step.number]
    taken = before - after
    if not formula.decay_in_gradient:
        taken = taken - (rate if formula.decay_by_rate else 1.0) * formula.decayed(name, before)
    return taken / rate


def other_epsilon(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """From the weight where it is the most certain."""
    step, formula = steps[0], method.formula
    rate = formula.rates[step.number]
    best, uncertainty = 0.0, math.inf
    for name in step.given if rate else ():
        first, second = formula.corrected(step, name)
        taken = removed(method, step, name)
        lost = 4 * np.spacing(np.abs(step.before.parameters[name])) / rate
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = first / taken  # sqrt(v) + eps, or sqrt(v + eps)
            noise = np.abs(quotient) * (lost / np.abs(taken) + 2.0**-50)
        estimate = quotient - np.sqrt(second)
        if formula.eps_in_root:
            estimate, noise = quotient**2 - second, 2 * np.abs(quotient) * noise
        known = np.isfinite(estimate) & (lost < 1e-3 * np.abs(taken))
        noise = np.where(known, noise, math.inf)
        place = np.unravel_index(np.argmin(noise), noise.shape)
        if noise[place] < uncertainty:
            best, uncertainty = float(estimate[place]), float(noise[place])
    value = tidied(best, uncertainty)
    if not 0 < value < math.inf:
        return None
    return {"eps": value}, f"epsilon is {value:.6g}, not {formula.eps:g}: set eps"


def other_decay(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """What is left of the step is the decay times the weights."""
    step, now = steps[0], method.formula
    rate = now.rates[step.number] if now.decay_by_rate else 1.0
    both = size = 0.0
    for name, before in step.before.parameters.items():
        if name in step.given and now.decays(before):
            adam = now.rates[step.number] * now.direction(step, name)
            left = before - step.after.parameters[name] - adam
            both += float(np.vdot(left, before))
            size += rate * float(np.vdot(before, before))
    if size == 0:
        return None
    value = tidied(both / size, 1e-9)
    what = f"the weight decay is {value:.6g}, not {now.weight_decay:g}"
    return {"weight_decay": value}, f"{what}: set weight_decay" if value else (
        f"nothing decays, here the weight decay is {now.weight_decay:g}"
    )


def fitted_rates(method: Method, steps: Steps) -> dict[int, float]:
    """The learning rate of each step, from all parameters."""
    found = {}
    for step in steps:
        both = size = 0.0
        for name, before in step.before.parameters.items():
            if name in step.given:
                unit = dataclasses.replace(method.formula, rates={step.number: 1.0})
                taken = unit.taken(step, name)
                both += float(np.vdot(before - step.after.parameters[name], taken))
                size += float(np.vdot(taken, taken))
        found[step.number] = both / size if size else 0.0
    return found


def shifted_rates(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """Those of the steps before or after."""
    found, now = fitted_rates(method, steps), method.formula.rates
    for shift, text in ((-1, "before it: the scheduler steps after"), (1, "after it")):
        if all(
            math.isclose(rate, now[step + shift], rel_tol=1e-9, abs_tol=1e-15)
            for step, rate in found.items()
        ):
            rates = now | {step: now[step + shift] for step in found}
            why = " the optimizer" if shift < 0 else ": the schedule counts from 1, not 0"
            return {"rates": rates}, f"each step has the learning rate of the one {text}{why}"
    return None


def other_rates(method: Method, steps: Steps) -> tuple[dict[str, Any], str] | None:
    """Any."""
    found, now = fitted_rates(method, steps), method.formula.rates
    rates = {step: tidied(rate, 1e-11 * abs(rate)) for step, rate in found.items()}
    factors = [rate / now[step] for step, rate in rates.items() if now[step]]
    text = ", ".join(f"{rate:.6g}, not {now[step]:.6g}" for step, rate in rates.items())
    if factors and np.allclose(factors, factors[0], rtol=1e-9, atol=0):
        text = f"{factors[0]:.6g} times ours ({text})"
    first = min(rates)
    return {"rates": now | rates}, f"the learning rate, from step {first} on, is {text}"


def other_settings(
    method: Method, steps: Steps, vectors: bool
) -> tuple[dict[str, Any], str] | None:
    """Learning rates, weight decay and epsilon at once."""
    now = method.formula
    changed = dataclasses.replace(now, decay_vectors=vectors)
    eps = tidied(nearest(changed, steps[0], with_epsilon=True)[2], 1e-6 * now.eps)
    if not eps > 0:
        return None
    changed = dataclasses.replace(changed, eps=eps)
    fitted = {step.number: nearest(changed, step) for step in steps}
    rates = {number: tidied(rate, 1e-11 * abs(rate)) for number, (rate, *_) in fitted.items()}
    decay = tidied(fitted[steps[0].number][1], 1e-9)
    on = "on biases and norms, too" if vectors else "on matrices"
    step = steps[0].number
    return (
        {"rates": now.rates | rates, "weight_decay": decay, "eps": eps, "decay_vectors": vectors},
        f"the learning rate of step {step} is {rates[step]:.6g}, not {now.rates[step]:.6g}, the "
        f"weight decay {decay:.6g} {on}, not {now.weight_decay:g} on matrices, and epsilon "
        f"{eps:.6g}, not {now.eps:g}",
    )


def nearest(
    formula: Formula, step: Step, *, with_epsilon: bool = False
) -> tuple[float, float, float]:
    """The rate, the decay and the epsilon by which Adam is nearest to what a step took, by least
    squares: `taken s = rate m + rate decay p s` with `s = sqrt(v) + eps`.

    That is linear in rate, eps, rate * decay and rate * decay * eps, too.
    """
    rows, wanted = [], []
    for name, before in step.before.parameters.items():
        if name in step.given:
            first, second = formula.corrected(step, name)
            taken = before - step.after.parameters[name]
            decay = before if formula.decays(before) else np.zeros_like(before)
            root = np.sqrt(second) + (0.0 if with_epsilon else formula.eps)
            columns = [first, decay * root, *([-taken, decay] if with_epsilon else [])]
            rows.append(np.stack(columns, -1).reshape(-1, len(columns)))
            wanted.append((taken * root).ravel())
    stride = -(-sum(map(len, rows)) // MOST_ROWS)
    matrix, right = (np.concatenate(parts)[::stride] for parts in (rows, wanted))
    sizes = np.linalg.norm(matrix, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    solution, *_ = np.linalg.lstsq(matrix / sizes, right, rcond=None)
    rate, both, *eps = solution / sizes
    return float(rate), float(both / rate) if rate else 0.0, float(eps[0] if eps else formula.eps)


MOST_ROWS = 10**6
"""Of large models only so many weights are asked."""
