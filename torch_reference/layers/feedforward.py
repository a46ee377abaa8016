"""Position-wise feed-forward networks, plain and gated."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jax_transformer.config import Activation, LayerConfig


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "..."]:
    """The nonlinearity of that name, in float32 or wider inside, rounded once.

    `gelu`: `x Phi(x)` with the exact normal distribution function (Hendrycks and Gimpel 2016);
    `gelu_tanh`: `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`, an approximation of that;
    `quick_gelu`: `x sigmoid(1.702 x)`, another; `silu`: `x sigmoid(x)` (lecture section 4.6);
    `relu`: `max(x, 0)`; `sigmoid`: `1 / (1 + exp(-x))`.
    """
    if activation == "gelu":
        return nn.functional.gelu(x, approximate="none")
    if activation == "gelu_tanh":
        return nn.functional.gelu(x, approximate="tanh")
    if activation == "quick_gelu":
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
    if activation == "silu":
        return nn.functional.silu(x)
    return torch.relu(x) if activation == "relu" else torch.sigmoid(x)


class FeedForward(nn.Module):
    """`y = dropout(activation(x W1^T + b1)) W2^T + b2`, W1 `[F, D]`, W2 `[D, F]`.

    Source: Vaswani et al. 2017, section 3.3 (ReLU); the lecture document (exact GELU).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        bias: bool = True,
    ):
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff, bias=bias)
        self.linear2 = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation: Activation = activation

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        hidden = activate(self.linear1(x), self.activation)
        return self.linear2(self.dropout(hidden))


class GatedFeedForward(nn.Module):
    """`y = dropout(activation(x W_gate^T) * (x W_up^T)) W_down^T`, W_gate and W_up `[F, D]`, W_down
    `[D, F]`.

    GLU (`sigmoid`), SwiGLU (`silu`), GeGLU (`gelu`, `gelu_tanh`), ReGLU (`relu`). It has 3/2 of the
    parameters of a `FeedForward` of the same F: see `gated_width`.
    Source: Shazeer 2020; lecture section 4.6; names as in Llama.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "silu",
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation: Activation = activation

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        hidden = activate(self.gate_proj(x), self.activation) * self.up_proj(x)
        return self.down_proj(self.dropout(hidden))


def gated_width(d_model: int, multiple_of: int = 256) -> int:
    """The F of a gated network with the parameters of a plain one of 4D: 8D/3, rounded up to a
    multiple (lecture section 4.6)."""
    return -(-8 * d_model // (3 * multiple_of)) * multiple_of


def make_feed_forward(config: LayerConfig) -> FeedForward | GatedFeedForward:
    """The feed-forward network of that configuration."""
    kind = GatedFeedForward if config.gated else FeedForward
    return kind(
        config.d_model, config.d_ff, config.dropout, config.activation, bias=config.ffn_bias
    )
