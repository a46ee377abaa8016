"""The position-wise feed-forward network."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jax_transformer.config import Activation


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "..."]:
    """`gelu`: `x Phi(x)` with the exact normal distribution function (Hendrycks and Gimpel
    2016); `relu`: `max(x, 0)`."""
    if activation == "relu":
        return torch.relu(x)
    return nn.functional.gelu(x, approximate="none")


class FeedForward(nn.Module):
    """`y = dropout(activation(x W1^T + b1)) W2^T + b2`, W1 `[F, D]`, W2 `[D, F]`.

    Source: Vaswani et al. 2017, section 3.3 (ReLU); the lecture document (exact GELU).
    """

    def __init__(
        self, d_model: int, d_ff: int, dropout: float = 0.1, activation: Activation = "gelu"
    ):
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation: Activation = activation

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        hidden = activate(self.linear1(x), self.activation)
        return self.linear2(self.dropout(hidden))
