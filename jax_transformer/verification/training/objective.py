"""The loss of a step and its gradients, in the forms that are met."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.config import IGNORED_LABEL, PAD_ID
from jax_transformer.models.parameters import flatten, split, unflatten
from jax_transformer.verification.compiled import PROGRAMS, as_arrays
from jax_transformer.verification.inputs import Batch
from jax_transformer.verification.training.recipe import Training
from jax_transformer.verification.training.recorded import Step, Tensors

Weighting = Literal[
    "tokens", "sum", "sentences", "rows", "places", "means of parts", "sums of means"
]
"""What the losses of the tokens are multiplied with before they are summed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """One way to make a loss and gradients of a batch; the defaults are those of `training.step`:
    the mean over tokens."""

    smoothing: float
    weighting: Weighting = "tokens"
    reported: Weighting = "tokens"
    """Of the loss that is told, where it is not that of the gradients."""
    parts: int = 1
    """Micro-batches that the rows are divided into, in their order."""
    factor: float = 1.0
    """On the gradients."""
    padding: bool = False
    """Padding is to be predicted, too."""
    shift: int = 0
    """Places that the labels are moved to the left."""
    untrained: tuple[tuple[str, int | None], ...] = ()
    """Names of parameters that get no gradient, or of tables and rows of them."""


def token_weights(labels: np.ndarray, weighting: Weighting, parts: int) -> np.ndarray:
    """`[B, T]`: the weights of the tokens, 0 where there is no label."""
    real = (labels != IGNORED_LABEL).astype(np.float64)
    rows, places = real.shape
    if weighting == "sum":
        return real
    if weighting == "places":
        return real / (rows * places)
    if weighting == "rows":
        return real / rows
    if weighting == "sentences":
        lengths = real.sum(axis=1, keepdims=True)
        return real / np.maximum(lengths, 1) / max((lengths > 0).sum(), 1)
    if weighting == "tokens":
        return real / max(real.sum(), 1)
    of_part = real.reshape(parts, -1, places)
    means = (of_part / np.maximum(of_part.sum(axis=(1, 2), keepdims=True), 1)).reshape(real.shape)
    return means / parts if weighting == "means of parts" else means


def changed_labels(labels: np.ndarray, objective: Objective) -> np.ndarray:
    """The labels that the objective has."""
    if objective.shift:
        moved = np.full_like(labels, IGNORED_LABEL)
        if objective.shift > 0:
            moved[:, : -objective.shift] = labels[:, objective.shift :]
        else:
            moved[:, -objective.shift :] = labels[:, : objective.shift]
        labels = moved
    return np.where(labels == IGNORED_LABEL, PAD_ID, labels) if objective.padding else labels


class OurObjective:
    """Our loss and gradients at the reference's parameters."""

    def __init__(self, model: nnx.Module, training: Training, call: Callable[..., Any]):
        self.graphdef, self.params, self.buffers = split(model)
        self.training = training
        self.call = call
        self._known: dict[Any, tuple[float, Tensors]] = {}

    def __call__(self, step: Step, objective: Objective) -> tuple[float, Tensors]:
        """The loss that is told, and the gradients, at the parameters before a step."""
        loss, gradients = self.weighted(step, objective, objective.weighting)
        if objective.reported != objective.weighting:
            loss, _ = self.weighted(step, objective, objective.reported)
        scaled = {name: objective.factor * g for name, g in gradients.items()}
        for name, row in objective.untrained:
            scaled[name][... if row is None else row] = 0.0
        return loss, scaled

    def vocab_size(self, step: Step) -> int:
        """Of the logits."""

        def logits(params: Any, batch: Batch) -> Any:
            model: Any = nnx.merge(self.graphdef, params, self.buffers)
            return self.call(model, *batch.inputs)

        return jax.eval_shape(logits, self.params, as_arrays(step.batch)).shape[-1]

    def weighted(
        self, step: Step, objective: Objective, weighting: Weighting
    ) -> tuple[float, Tensors]:
        """Under one weighting; computed once."""
        reading = dataclasses.replace(
            objective, weighting=weighting, reported=weighting, factor=1.0
        )
        key = (step.number, reading)
        if key not in self._known:
            self._known[key] = self.computed(step, objective, weighting)
        return self._known[key]

    def computed(
        self, step: Step, objective: Objective, weighting: Weighting
    ) -> tuple[float, Tensors]:
        """Likewise."""
        named = flatten(self.params) | {
            name: jnp.asarray(value)
            for name, value in step.before.parameters.items()
            if name in flatten(self.params)
        }
        params = unflatten(named, self.params)
        batch, weights = step.batch, None
        if self.training.loss is None and batch.labels is not None:
            labels = changed_labels(batch.labels, objective)
            batch = batch._replace(labels=labels)
            weights = jnp.asarray(token_weights(labels, weighting, objective.parts))
        arguments = (params, self.buffers, as_arrays(batch), weights, objective.smoothing)
        arguments = jax.tree.map(jnp.asarray, arguments)
        settings = (self.graphdef, self.training.loss, self.call)
        loss, gradients = PROGRAMS.run(value_and_gradient, settings, *arguments)
        trained = step.before.parameters
        found = {n: np.asarray(g) for n, g in flatten(gradients).items() if n in trained}
        return float(loss), found


def value_and_gradient(graphdef: nnx.GraphDef, loss: Any, call: Callable[..., Any]) -> Any:
    """Loss and gradients of parameters, buffers, batch, weights of tokens and smoothing."""

    @jax.value_and_grad
    def run(params: Any, buffers: Any, batch: Any, weights: Any, smoothing: Any) -> Any:
        model: Any = nnx.merge(graphdef, params, buffers)
        output = call(model, *batch.inputs)
        if loss is not None:
            return loss(output, batch.labels)
        return (weights * token_losses(output, batch.labels, smoothing)).sum()

    return run


def token_losses(logits: jax.Array, labels: jax.Array, smoothing: jax.Array) -> jax.Array:
    """`[B, T]`: `training.loss.cross_entropy` of each token, 0 where there is no label."""
    real = labels != IGNORED_LABEL
    picked = jnp.take_along_axis(logits, jnp.where(real, labels, 0)[..., None], axis=-1)[..., 0]
    expected = (1 - smoothing) * picked + smoothing * logits.mean(axis=-1)
    return jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - expected, 0.0)
