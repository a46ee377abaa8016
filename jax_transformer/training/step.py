"""One training step: gradients of the mean loss, clipping, Adam, in one compiled program."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_transformer.config import (
    IGNORED_LABEL,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    ModelConfig,
)
from jax_transformer.decoding.greedy import table_rows
from jax_transformer.errors import InputError
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


def language_loss(
    graphdef: nnx.GraphDef,
    params: Tree,
    buffers: Tree,
    batch: Any,
    *,
    label_smoothing: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
) -> LossSum:
    """Loss of a causal language model: each token predicts the next one of its document.

    `batch` has the fields of `data.packing.PackedBatch`, as arrays.
    """
    model = nnx.merge(graphdef, params, buffers)
    logits = model(
        batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        dropout_key=dropout_key,
    )
    return cross_entropy(
        logits, batch.labels, ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )


def check_batch(batch: Any, config: ModelConfig | EncoderDecoderConfig) -> None:
    """Refuse a batch that the model would read NaN or nonsense from, before it is on a device.

    Args:
        batch: has the fields of `data.batches.Batch`, as arrays on the host.
        config: of the model.

    Raises:
        InputError: an id outside the vocabulary; a label that is neither an id nor
            `IGNORED_LABEL`; rows longer than the position table; a length that is not one;
            fields whose shapes disagree.
    """
    rows, source_width = np.shape(batch.source)
    _, target_width = np.shape(batch.labels)
    for name, shape in {
        "source": (rows, source_width),
        "source_lengths": (rows,),
        "decoder_input": (rows, target_width),
        "labels": (rows, target_width),
        "target_lengths": (rows,),
    }.items():
        if np.shape(getattr(batch, name)) != shape:
            raise InputError(
                f"batch.{name} is {list(np.shape(getattr(batch, name)))}, must be {list(shape)}: "
                f"all fields have the same rows, decoder_input and labels the same width"
            )
    table = table_rows(config)
    for name, width in (("source", source_width), ("labels", target_width)):
        if table is not None and width > table:
            raise InputError(
                f"batch.{name} has rows of {width} tokens, more than the {table} of the "
                f"position table: cut them, or make the model with a larger max_len"
            )
    check_values("batch.source", batch.source, config.src_vocab_size or 0)
    check_values("batch.decoder_input", batch.decoder_input, config.tgt_vocab_size)
    check_values("batch.labels", batch.labels, config.tgt_vocab_size, other=IGNORED_LABEL)
    check_values("batch.source_lengths", batch.source_lengths, source_width + 1)
    check_values("batch.target_lengths", batch.target_lengths, target_width + 1)


def check_packed_batch(batch: Any, config: DecoderOnlyConfig) -> None:
    """As `check_batch`, of a batch with the fields of `data.packing.PackedBatch`.

    Raises:
        InputError: an id outside the vocabulary; a label that is neither an id nor
            `IGNORED_LABEL`; a position past the table, where the model has one; fields whose
            shapes disagree.
    """
    shape = np.shape(batch.tokens)
    for name in ("labels", "positions", "segments"):
        if np.shape(getattr(batch, name)) != shape:
            raise InputError(
                f"batch.{name} is {list(np.shape(getattr(batch, name)))}, must be {list(shape)} as "
                f"the tokens are"
            )
    check_values("batch.tokens", batch.tokens, config.vocab_size)
    check_values("batch.labels", batch.labels, config.vocab_size, other=IGNORED_LABEL)
    has_table = config.position in ("learned", "sinusoidal")
    check_values("batch.positions", batch.positions, config.max_len if has_table else 2**31)
    check_values("batch.segments", batch.segments, 2**31)


def check_values(name: str, array: Any, limit: int, *, other: int | None = None) -> None:
    """Refuse an array that holds anything but whole numbers from 0 to `limit - 1`, or `other`.

    Raises:
        InputError: with the first such value and its place.
    """
    array = np.asarray(array)
    allowed = f"a whole number from 0 to {limit - 1}" + ("" if other is None else f", or {other}")
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} has dtype {array.dtype}: each value must be {allowed}")
    wrong = (array < 0) | (array >= limit)
    if other is not None:
        wrong &= array != other
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise InputError(f"{name}{list(place)} is {array[place]}: must be {allowed}")


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    label_smoothing: float = 0.1,
    loss: Callable[..., LossSum] = batch_loss,
    dropout_key: Key[Array, ""] | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    average_decay: float = 0.0,
) -> Callable[[TrainState, Tree, Any], tuple[TrainState, StepMetrics]]:
    """The jitted `(state, buffers, batch) -> (state, metrics)`; the state's memory is reused.

    Inside the program nothing can be refused any more: give batches that are not those of
    `data.batches` or `data.packing` to `check_batch` or `check_packed_batch` first.

    `loss` is `batch_loss` for a `Transformer`, `language_loss` for a `DecoderOnly`.

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
            summed = loss(
                graphdef,
                params,
                buffers,
                batch,
                label_smoothing=label_smoothing,
                dropout_key=key,
            )
            return summed.mean(), summed

        gradients, summed = jax.grad(mean_loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(summed, optax.tree_utils.tree_get(opt_state, "gradient_norm"))
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
