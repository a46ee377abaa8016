"""Cross-entropy over the vocabulary, as a sum and a count."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.config import IGNORED_LABEL


class LossSum(NamedTuple):
    """A sum over tokens and the number of tokens: add both before dividing.

    A mean of means would weigh the tokens of small batches, micro-batches or devices more.
    """

    total: Float[Tensor, ""]
    """Nats."""
    count: Int[Tensor, ""]

    def mean(self) -> Float[Tensor, ""]:
        """Nats per token; 0 where there is no token."""
        return self.total / self.count.clamp(min=1)


def cross_entropy(
    logits: Float[Tensor, "B T V"],
    labels: Int[Tensor, "B T"],
    *,
    ignore_index: int = IGNORED_LABEL,
    label_smoothing: float = 0.0,
) -> LossSum:
    """`sum_i (1 - e) (-log p_i[y_i]) + e mean_v(-log p_i[v])`, labels of `ignore_index` left out.

    PyTorch's own, in float32 or wider.
    """
    total = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return LossSum(total, (labels != ignore_index).sum())
