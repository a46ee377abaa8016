"""Means over the steps between two lines of the metrics file."""

from typing import NamedTuple, Self

import numpy as np

from jax_transformer.training.step import StepMetrics


class LogWindow(NamedTuple):
    """Sums over the steps since the last line, part of every checkpoint: a run that is stopped
    between two lines writes the next one as if it had not been."""

    total: np.ndarray
    """Nats."""
    tokens: np.ndarray
    gradient_norms: np.ndarray
    steps: np.ndarray

    @classmethod
    def empty(cls) -> Self:
        """No step yet."""
        nats, tokens = np.zeros((), np.float32), np.zeros((), np.int32)
        return cls(nats, tokens, nats, tokens)

    def add(self, step: StepMetrics) -> Self:
        """One step more."""
        return type(self)(
            self.total + np.float32(step.loss.total),
            self.tokens + np.int32(step.loss.count),
            self.gradient_norms + np.float32(step.gradient_norm),
            self.steps + np.int32(1),
        )

    @property
    def loss(self) -> float:
        """Nats per token, label smoothing included."""
        return float(self.total) / max(int(self.tokens), 1)

    @property
    def gradient_norm(self) -> float:
        """Mean over steps, before clipping."""
        return float(self.gradient_norms) / max(int(self.steps), 1)
