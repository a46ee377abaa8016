"""Normalisation over the features of each token."""

from jaxtyping import Float
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last axis.

    `eps` is 1e-5. PyTorch's kernel takes mean and variance in float32 or wider whatever the dtype
    of x. Source: Ba et al. 2016; lecture section 4.1.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__(d_model, eps=eps)

    def forward(self, input: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return super().forward(input)
