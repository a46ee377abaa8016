"""Position-wise feed-forward networks, plain and gated."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jax_transformer.config import Activation, LayerConfig
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.fusion import materialize
from jax_transformer.layers.linear import Linear


def activate(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """The nonlinearity of that name, in float32 or wider inside, rounded once.

    `gelu`: `x Phi(x)` with the exact normal distribution function (Hendrycks and Gimpel 2016);
    `gelu_tanh`: `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`, an approximation of that;
    `quick_gelu`: `x sigmoid(1.702 x)`, another; `silu`: `x sigmoid(x)` (lecture section 4.6);
    `relu`: `max(x, 0)`; `sigmoid`: `1 / (1 + exp(-x))`.
    """
    if activation == "gelu":
        return gelu(x)
    return jax.nn.relu(x) if activation == "relu" else smooth(activation, x)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x Phi(x)`, in float32 or wider inside; Phi is computed once and saved for the derivative
    `Phi(x) + x phi(x)`."""
    return _gelu_forward(x)[0]


def _gelu_forward(x: Float[Array, "..."]) -> tuple[Array, tuple[Array, Array]]:
    wide = widen(x)
    distribution = materialize(normal_distribution(wide))
    return (wide * distribution).astype(x.dtype), (x, distribution)


def _gelu_backward(saved: tuple[Array, Array], gradient: Float[Array, "..."]) -> tuple[Array]:
    x, distribution = saved
    wide = x.astype(distribution.dtype)
    return ((gradient * (distribution + wide * normal_density(wide))).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def normal_distribution(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`Phi(x)`."""
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def normal_density(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`phi(x)`."""
    return jnp.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def smooth(activation: Activation, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """An activation of which the derivative recomputes all from x, where autodiff would save its
    sigmoid and products of it."""
    return value_and_slope(activation, widen(x))[0].astype(x.dtype)


def _smooth_forward(activation: Activation, x: Float[Array, "..."]) -> tuple[Array, Array]:
    return smooth(activation, x), x


def _smooth_backward(
    activation: Activation, x: Float[Array, "..."], gradient: Float[Array, "..."]
) -> tuple[Array]:
    return ((gradient * value_and_slope(activation, widen(x))[1]).astype(x.dtype),)


smooth.defvjp(_smooth_forward, _smooth_backward)


def value_and_slope(activation: Activation, x: Float[Array, "..."]) -> tuple[Array, Array]:
    """`f(x)` and `f'(x)` of every activation.

    The tanh GELU is `x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))`: one of three activations
    `x sigmoid(z)` with the slope `s + x z' s (1 - s)`.
    """
    if activation == "relu":
        return jax.nn.relu(x), (x > 0).astype(x.dtype)
    if activation == "gelu":
        distribution = normal_distribution(x)
        return x * distribution, distribution + x * normal_density(x)
    if activation == "sigmoid":
        gate = jax.nn.sigmoid(x)
        return gate, gate * (1.0 - gate)
    if activation == "gelu_tanh":
        scale = math.sqrt(8.0 / math.pi)
        inner = scale * (x + 0.044715 * x * x * x)
        inner_slope = scale * (1.0 + 3 * 0.044715 * x * x)
    else:
        inner_slope = 1.702 if activation == "quick_gelu" else 1.0
        inner = inner_slope * x
    gate = jax.nn.sigmoid(inner)
    return x * gate, gate + x * inner_slope * gate * (1.0 - gate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def activate_gated(
    gate: Float[Array, "..."], up: Float[Array, "..."], activation: Activation
) -> Float[Array, "..."]:
    """`activation(gate) * up`, each rounded to its dtype; the derivative saves gate and up alone
    and recomputes the rest."""
    return activate(gate, activation) * up


def _activate_gated_forward(
    gate: Float[Array, "..."], up: Float[Array, "..."], activation: Activation
) -> tuple[Array, tuple[Array, Array]]:
    return activate_gated(gate, up, activation), (gate, up)


def _activate_gated_backward(
    activation: Activation, saved: tuple[Array, Array], gradient: Float[Array, "..."]
) -> tuple[Array, Array]:
    gate, up = saved
    value, slope = value_and_slope(activation, widen(gate))
    d_gate = (gradient * up * slope).astype(gate.dtype)
    return materialize((d_gate, (gradient * value).astype(up.dtype)))


activate_gated.defvjp(_activate_gated_forward, _activate_gated_backward)


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
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.linear1 = Linear(d_model, d_ff, bias=bias, rngs=rngs)
        self.linear2 = Linear(d_ff, d_model, bias=bias, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        hidden = activate(self.linear1(x), self.activation)
        return self.linear2(self.dropout(hidden, dropout_key))


class GatedFeedForward(nnx.Module):
    """`y = dropout(activation(x W_gate) * (x W_up)) W_down`, W_gate and W_up `[D, F]`, W_down
    `[F, D]`.

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
        rngs: nnx.Rngs,
    ):
        self.gate_proj = Linear(d_model, d_ff, bias=bias, rngs=rngs)
        self.up_proj = Linear(d_model, d_ff, bias=bias, rngs=rngs)
        self.down_proj = Linear(d_ff, d_model, bias=bias, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.activation: Activation = activation

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        hidden = activate_gated(self.gate_proj(x), self.up_proj(x), self.activation)
        return self.down_proj(self.dropout(hidden, dropout_key))


def gated_width(d_model: int, multiple_of: int = 256) -> int:
    """The F of a gated network with the parameters of a plain one of 4D: 8D/3, rounded up to a
    multiple (lecture section 4.6)."""
    return -(-8 * d_model // (3 * multiple_of)) * multiple_of


def make_feed_forward(config: LayerConfig, *, rngs: nnx.Rngs) -> FeedForward | GatedFeedForward:
    """The feed-forward network of that configuration."""
    kind = GatedFeedForward if config.gated else FeedForward
    return kind(
        config.d_model,
        config.d_ff,
        config.dropout,
        config.activation,
        bias=config.ffn_bias,
        rngs=rngs,
    )
