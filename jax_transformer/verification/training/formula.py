"""The steps of Adam in the forms that are met, each part fed with what the reference has there."""

import dataclasses
from typing import Literal

import numpy as np

from jax_transformer.training.optimizer import CLIP_EPSILON
from jax_transformer.verification.training.recipe import Recipe
from jax_transformer.verification.training.recorded import State, Step, Tensors, norm_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formula:
    """One way to make a step of gradients; the defaults are those of `training.optimizer`.

    g = clip(gradients)                   g += decay p     where `decay_in_gradient`
    m = b1 m + (1 - b1) g                 v = b2 v + (1 - b2) g^2
    p -= rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)
    """

    rates: dict[int, float]
    """By step, from 1."""
    b1: float
    b2: float
    eps: float
    max_norm: float | None
    """None: no clipping."""
    weight_decay: float
    clip: Literal["together", "each", "values"] = "together"
    """By the norm of all gradients, of each tensor's, or value by value."""
    clip_epsilon: float = CLIP_EPSILON
    eps_in_root: bool = False
    correct_first: bool = True
    correct_second: bool = True
    decay_in_gradient: bool = False
    decay_vectors: bool = False
    """On biases and scales of norms, too."""
    decay_by_rate: bool = True

    @classmethod
    def of(cls, recipe: Recipe, steps: int) -> "Formula":
        """What the project's optimizer does in as many steps, and in the one after them."""
        return cls(
            rates={step: recipe.rate(step) for step in range(1, steps + 2)} | {0: 0.0},
            b1=recipe.b1,
            b2=recipe.b2,
            eps=recipe.eps,
            max_norm=recipe.max_norm,
            weight_decay=recipe.weight_decay,
        )

    def clipped(self, gradients: Tensors) -> Tensors:
        """What the optimizer is given."""
        if self.max_norm is None:
            return gradients
        limit = self.max_norm
        if self.clip == "values":
            return {name: np.clip(g, -limit, limit) for name, g in gradients.items()}
        norm = norm_of(gradients)

        def factor(gradient: np.ndarray) -> float:
            size = norm if self.clip == "together" else float(np.linalg.norm(gradient))
            return min(1.0, limit / (size + self.clip_epsilon))

        return {name: g * factor(g) for name, g in gradients.items()}

    def decayed(self, name: str, parameter: np.ndarray) -> np.ndarray | float:
        """What the decay adds."""
        return self.weight_decay * parameter if self.decays(parameter) else 0.0

    def decays(self, parameter: np.ndarray) -> bool:
        """Whether the decay falls on it."""
        return self.decay_vectors or parameter.ndim >= 2

    def moments(self, given: Tensors, before: State) -> tuple[Tensors, Tensors]:
        """Both, after the gradients that the optimizer was given."""
        first, second = {}, {}
        for name, gradient in given.items():
            if self.decay_in_gradient:
                gradient = gradient + self.decayed(name, before.parameters[name])
            first[name] = self.b1 * before.first[name] + (1 - self.b1) * gradient
            second[name] = self.b2 * before.second[name] + (1 - self.b2) * np.square(gradient)
        return first, second

    def direction(self, step: Step, name: str) -> np.ndarray:
        """What Adam takes from a parameter at the rate 1, of the moments after the step."""
        first, second = self.corrected(step, name)
        if self.eps_in_root:
            return first / np.sqrt(second + self.eps)
        return first / (np.sqrt(second) + self.eps)

    def corrected(self, step: Step, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The moments after the step, corrected for their start at zero."""
        first, second = step.after.first[name], step.after.second[name]
        if self.correct_first:
            first = first / (1 - self.b1**step.number)
        if self.correct_second:
            second = second / (1 - self.b2**step.number)
        return first, second

    def taken(self, step: Step, name: str) -> np.ndarray:
        """What the step takes from a parameter."""
        rate = self.rates[step.number]
        taken = rate * self.direction(step, name)
        if not self.decay_in_gradient:
            decay = self.decayed(name, step.before.parameters[name])
            taken = taken + (rate if self.decay_by_rate else 1.0) * decay
        return taken
