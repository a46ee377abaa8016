"""Cross-entropy over the vocabulary, as a sum and a count."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_transformer.config import IGNORED_LABEL


class LossSum(NamedTuple):
    """A sum over tokens and the number of tokens: add both before dividing.

    A mean of means would weigh the tokens of small batches, micro-batches or devices more.
    """

    total: Float[Array, ""]
    """Nats."""
    count: Int[Array, ""]

    def mean(self) -> Float[Array, ""]:
        """Nats per token; 0 where there is no token."""
        return self.total / jnp.maximum(self.count, 1)


def cross_entropy(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    *,
    ignore_index: int = IGNORED_LABEL,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`sum_i (1 - e) (-log p_i[y_i]) + e mean_v(-log p_i[v])`, labels of `ignore_index` left out.

    The smoothing e is spread over all V classes, the label's own included, as
    `torch.nn.functional.cross_entropy` does (Szegedy et al. 2016, section 7). In float32 or
    wider. Written as log-sum-exp minus logits, which never stores the log-probabilities.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    valid = labels != ignore_index
    # Replaced before the gather: an ignored label is no index, and NaN * 0 is NaN. Any other
    # label outside the vocabulary reads NaN; a negative one would count from the end.
    vocab_size = logits.shape[-1]
    safe = jnp.where(valid, jnp.where(labels < 0, vocab_size, labels), 0)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, safe[..., None], axis=-1, mode="fill")[..., 0]
    expected = (1.0 - label_smoothing) * picked + label_smoothing * logits.mean(axis=-1)
    losses = jnp.where(valid, normalizer - expected, 0.0)
    return LossSum(losses.sum(), valid.sum())
