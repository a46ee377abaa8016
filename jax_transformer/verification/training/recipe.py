"""How both sides are trained: the project's own optimizer and loss, and the reference's."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_transformer.training.loss import LossSum, cross_entropy
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import cosine_schedule
from jax_transformer.verification.inputs import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Clipping, then AdamW with the decay on matrices, a rate that changes with each step.

    The defaults let each part act: compare with those of your own run where you verify one.
    """

    peak_rate: float = 1e-3
    warmup_steps: int = 4
    decay_steps: int = 100
    """The step at which the cosine ends."""
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    max_norm: float = 1.0
    weight_decay: float = 0.1
    label_smoothing: float = 0.1

    def optimizer(self) -> optax.GradientTransformation:
        """That of `training.optimizer`."""
        schedule = cosine_schedule(self.peak_rate, self.decay_steps, self.warmup_steps)
        return adam(
            schedule,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            max_norm=self.max_norm,
            weight_decay=self.weight_decay,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        schedule = cosine_schedule(self.peak_rate, self.decay_steps, self.warmup_steps)
        with jax.enable_x64(True):
            return float(jnp.asarray(schedule(step - 1)))


TorchStep = Callable[[Batch], Any]
"""Takes one step on a batch of tensors and returns its loss."""

TorchTrainer = Callable[[Any, Callable[[Batch], Any], Recipe], TorchStep]
"""`trainer(model, loss, recipe)`: what trains the PyTorch model. `loss(batch).mean()` is to be made
smaller; a loop of one's own need not use it, nor the recipe."""


def reference_trainer(model: Any, loss: Callable[[Batch], Any], recipe: Recipe) -> TorchStep:
    """The training step of `torch_reference`: AdamW and `clip_grad_norm_` of PyTorch."""
    from torch_reference.training import step as reference
    from torch_reference.training.schedule import CosineLRScheduler

    optimizer = reference.adamw(
        model, b1=recipe.b1, b2=recipe.b2, eps=recipe.eps, weight_decay=recipe.weight_decay
    )
    scheduler = CosineLRScheduler(
        optimizer, recipe.peak_rate, recipe.decay_steps, recipe.warmup_steps
    )

    def step(batch: Batch) -> Any:
        metrics = reference.train_step(
            model,
            optimizer,
            scheduler,
            batch,
            loss=lambda model, batch, label_smoothing: loss(batch),
            max_norm=recipe.max_norm,
        )
        return metrics.loss.mean()

    return step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How both sides of a pair are trained, and on what: one step a batch.

    The losses make one number of the output and the labels; None: the mean cross-entropy of the
    tokens that have a label, with the recipe's label smoothing.
    """

    batches: Sequence[Batch]
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    loss: Callable[[jax.Array, Any], jax.Array] | None = None
    torch_loss: Callable[[Any, Any], Any] | None = None
    torch_trainer: TorchTrainer = reference_trainer

    def our_loss(self, output: jax.Array, labels: Any) -> LossSum:
        """Of the JAX side."""
        if self.loss is not None:
            return LossSum(self.loss(output, labels), jnp.int32(1))
        return cross_entropy(output, labels, label_smoothing=self.recipe.label_smoothing)

    def their_loss(self, output: Any, labels: Any) -> Any:
        """Of the PyTorch side."""
        import torch

        from torch_reference.training import loss

        if self.torch_loss is not None:
            return loss.LossSum(self.torch_loss(output, labels), torch.tensor(1))
        return loss.cross_entropy(output, labels, label_smoothing=self.recipe.label_smoothing)
