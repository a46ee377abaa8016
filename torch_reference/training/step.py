"""One training step: gradients of the mean loss, clipping, Adam or AdamW."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from jax_transformer.config import IGNORED_LABEL
from torch_reference.layers.mask import create_decoder_length_mask, create_length_mask
from torch_reference.models.decoder_only import DecoderOnly
from torch_reference.models.encoder_decoder import Transformer
from torch_reference.training.loss import LossSum, cross_entropy
from torch_reference.training.schedule import LRScheduler


class StepMetrics(NamedTuple):
    """What a step reports."""

    loss: LossSum
    gradient_norm: Float[Tensor, ""]
    """Before clipping."""


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    """Adam with the constants of Vaswani et al. 2017, section 5.3, and rate 0 until set."""
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)


def adamw(
    model: torch.nn.Module, *, b1: float, b2: float, eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with rate 0 until set, decay on matrices only: a parameter of one dimension is a
    bias or the scale of a norm."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2]},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(b1, b2), eps=eps, weight_decay=weight_decay)


def batch_loss(model: Transformer, batch: Any, *, label_smoothing: float = 0.0) -> LossSum:
    """Teacher-forced loss: `decoder_input` (start token first) predicts `labels` (end token last).

    `batch` has the fields of `jax_transformer.data.batches.Batch`, as tensors. Masks come from
    the lengths of the rows.
    """
    src_mask = create_length_mask(batch.source_lengths, batch.source.shape[1])
    tgt_mask = create_decoder_length_mask(batch.target_lengths, batch.labels.shape[1])
    logits = model(batch.source, batch.decoder_input, src_mask, tgt_mask)
    return cross_entropy(
        logits, batch.labels, ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )


def language_loss(model: DecoderOnly, batch: Any, *, label_smoothing: float = 0.0) -> LossSum:
    """Loss of a causal language model: each token predicts the next one of its document.

    `batch` has the fields of `jax_transformer.data.packing.PackedBatch`, as tensors.
    """
    logits = model(batch.tokens, positions=batch.positions, segments=batch.segments)
    return cross_entropy(
        logits, batch.labels, ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    batch: Any,
    *,
    label_smoothing: float = 0.1,
    loss: Callable[..., LossSum] = batch_loss,
    max_norm: float = 1.0,
    document_order: bool = False,
) -> StepMetrics:
    """One update of `model`; dropout as the model's mode has it.

    `loss` is `batch_loss` for a `Transformer`, `language_loss` for a `DecoderOnly`.
    `document_order` steps the scheduler after the optimiser, as the lecture document's loop does.
    """
    if not document_order:
        scheduler.step()
    summed = loss(model, batch, label_smoothing=label_smoothing)
    optimizer.zero_grad()
    summed.mean().backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    if document_order:
        scheduler.step()
    return StepMetrics(LossSum(summed.total.detach(), summed.count), gradient_norm)
