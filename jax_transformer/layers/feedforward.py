"""The position-wise feed-forward network."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from jax_transformer.config import Activation
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.linear import linear


def activate(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """`gelu`: `x Phi(x)` with the exact normal distribution function (Hendrycks and Gimpel
    2016); `relu`: `max(x, 0)`."""
    if activation == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=False)


class FeedForward(nnx.Module):
    """`y = dropout(activation(x W1 + b1)) W2 + b2`, W1 `[D, F]`, W2 `[F, D]`.

    Source: Vaswani et al. 2017, section 3.3 (ReLU); the lecture document (exact GELU).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        self.linear1 = linear(d_model, d_ff, rngs=rngs)
        self.linear2 = linear(d_ff, d_model, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        hidden = activate(self.linear1(x), self.activation)
        return self.linear2(self.dropout(hidden, dropout_key))
