"""One training step: gradients of the mean loss, clipping, Adam, in one compiled program."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.data.batches import Batch
from jax_transformer.layers.mask import create_decoder_length_mask, create_length_mask
from jax_transformer.models.parameters import Tree, cast
from jax_transformer.training.loss import LossSum, cross_entropy


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Tree
    opt_state: optax.OptState
    step: Int[Array, ""]
    """Updates made."""


class StepMetrics(NamedTuple):
    """What a step reports; reading one waits for the step."""

    loss: LossSum
    gradient_norm: Float[Array, ""]
    """Before clipping."""


def batch_loss(
    graphdef: nnx.GraphDef,
    params: Tree,
    buffers: Tree,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> LossSum:
    """Teacher-forced loss: `decoder_input` (start token first) predicts `labels` (end token last).

    Masks come from the lengths of the rows.
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
) -> Callable[[TrainState, Tree, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted `(state, buffers, batch) -> (state, metrics)`; the state's memory is reused.

    The dropout key of a step is `fold_in(dropout_key, state.step)`; no key, no dropout. With a
    `compute_dtype` the forward and backward passes run on a copy of the parameters in that
    dtype; parameters, gradients' sum and moments stay as they are.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, buffers: Tree, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
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
        return TrainState(params, opt_state, state.step + 1), metrics

    return train_step


def start_state(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params, optimizer.init(params), jnp.int32(0))
