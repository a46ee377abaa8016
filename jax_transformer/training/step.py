"""One training step: gradients of the mean loss, clipping, Adam, in one compiled program."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.layers.mask import create_decoder_length_mask, create_length_mask
from jax_transformer.models.parameters import Tree, cast
from jax_transformer.training.loss import LossSum, cross_entropy


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Tree
    opt_state: optax.OptState
    step: Int[Array, ""]
    """Updates made."""
    average: Tree | None
    """The running average of the parameters, if one is kept."""


class StepMetrics(NamedTuple):
    """What a step reports; reading one waits for the step."""

    loss: LossSum
    gradient_norm: Float[Array, ""]
    """Before clipping."""


def batch_loss(
    graphdef: nnx.GraphDef,
    params: Tree,
    buffers: Tree,
    batch: Any,
    *,
    label_smoothing: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> LossSum:
    """Teacher-forced loss: `decoder_input` (start token first) predicts `labels` (end token last).

    `batch` has the fields of `data.batches.Batch`, as arrays. Masks come from the lengths of the
    rows.
    """
    model = nnx.merge(graphdef, params, buffers)
    src_mask = create_length_mask(batch.source_lengths, batch.source.shape[1])
    tgt_mask = create_decoder_length_mask(batch.target_lengths, batch.labels.shape[1])
    logits = model(batch.source, batch.decoder_input, src_mask, tgt_mask, dropout_key=dropout_key)
    return cross_entropy(
        logits, batch.labels, ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    label_smoothing: float = 0.1,
    dropout_key: Key[Array, ""] | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    average_decay: float = 0.0,
) -> Callable[[TrainState, Tree, Any], tuple[TrainState, StepMetrics]]:
    """The jitted `(state, buffers, batch) -> (state, metrics)`; the state's memory is reused.

    The dropout key of a step is `fold_in(dropout_key, state.step)`; no key, no dropout. With a
    `compute_dtype` the forward and backward passes run on a copy of the parameters in that
    dtype; parameters, gradients and moments stay as they are.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, buffers: Tree, batch: Any) -> tuple[TrainState, StepMetrics]:
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, state.step)

        def mean_loss(params: Tree) -> tuple[Array, LossSum]:
            if compute_dtype is not None:
                params = cast(params, compute_dtype)
            loss = batch_loss(
                graphdef,
                params,
                buffers,
                batch,
                label_smoothing=label_smoothing,
                dropout_key=key,
            )
            return loss.mean(), loss

        gradients, loss = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(loss, optax.tree_utils.tree_get(opt_state, "gradient_norm"))
        average = update_average(state.average, params, state.step, average_decay)
        return TrainState(params, opt_state, state.step + 1, average), metrics

    return train_step


def start_state(
    params: Tree, optimizer: optax.GradientTransformation, *, average_decay: float = 0.0
) -> TrainState:
    """The state before the first step."""
    average = jax.tree.map(jnp.copy, params) if average_decay else None
    return TrainState(params, optimizer.init(params), jnp.int32(0), average)


def update_average(
    average: Tree | None, params: Tree, step: Int[Array, ""], decay: float
) -> Tree | None:
    """`average = d average + (1 - d) params`, `d = min(decay, (1 + step) / (10 + step))`.

    The smaller d of the first steps lets the average leave the initial values. Source: Polyak
    and Juditsky 1992; Vaswani et al. 2017, section 6.1, average checkpoints to the same end.
    """
    if average is None:
        return None
    step = step.astype(jnp.result_type(float))
    weight = 1.0 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(
        lambda mean, leaf: mean + weight.astype(leaf.dtype) * (leaf - mean), average, params
    )
