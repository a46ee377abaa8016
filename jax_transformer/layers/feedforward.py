"""The position-wise feed-forward network."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jax_transformer.config import Activation
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.fusion import materialize
from jax_transformer.layers.linear import Linear


def activate(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """`gelu`: `x Phi(x)` with the exact normal distribution function (Hendrycks and Gimpel
    2016); `relu`: `max(x, 0)`."""
    return jax.nn.relu(x) if activation == "relu" else gelu(x)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x Phi(x)`, in float32 or wider inside; Phi is computed once and saved for the derivative
    `Phi(x) + x phi(x)`."""
    return _gelu_forward(x)[0]


def _gelu_forward(x: Float[Array, "..."]) -> tuple[Array, tuple[Array, Array]]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    distribution = materialize(0.5 * (1.0 + jax.lax.erf(wide * math.sqrt(0.5))))
    return (wide * distribution).astype(x.dtype), (x, distribution)


def _gelu_backward(saved: tuple[Array, Array], gradient: Float[Array, "..."]) -> tuple[Array]:
    x, distribution = saved
    wide = x.astype(distribution.dtype)
    density = jnp.exp(-0.5 * wide * wide) * (1.0 / math.sqrt(2.0 * math.pi))
    return ((gradient * (distribution + wide * density)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


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
        self.linear1 = Linear(d_model, d_ff, rngs=rngs)
        self.linear2 = Linear(d_ff, d_model, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        hidden = activate(self.linear1(x), self.activation)
        return self.linear2(self.dropout(hidden, dropout_key))
