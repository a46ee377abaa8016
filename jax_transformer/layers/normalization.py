"""Normalisation over the features of each token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.layers.fusion import materialize


class LayerNorm(nnx.Module):
    """`y = scale * (x - mean(x)) / sqrt(var(x) + epsilon) + bias` over the last axis.

    Mean and (biased) variance are taken in float32 or wider, in two passes, whatever the dtype
    of x. `epsilon` is PyTorch's 1e-5; Flax's own default is 1e-6. Source: Ba et al. 2016; lecture
    section 4.1. PyTorch calls `scale` `weight`.
    """

    def __init__(self, d_model: int, epsilon: float = 1e-5):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(d_model, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(d_model, jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale, bias = self.scale[...].astype(wide), self.bias[...].astype(wide)
        return layer_norm(self.epsilon, x.astype(wide), scale, bias).astype(x.dtype)


Saved = tuple[Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_norm(
    epsilon: float, x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"]
) -> Float[Array, "... D"]:
    """The formula of `LayerNorm`; its derivative is written out below to save x and one mean and
    deviation a token, where autodiff saves four arrays of the size of x."""
    return _layer_norm_forward(epsilon, x, scale, bias)[0]


def _layer_norm_forward(
    epsilon: float, x: Float[Array, "... D"], scale: Float[Array, " D"], bias: Float[Array, " D"]
) -> tuple[Float[Array, "... D"], Saved]:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    mean, inverse = materialize((mean, jax.lax.rsqrt(variance + epsilon)))
    return (x - mean) * inverse * scale + bias, (x, scale, mean, inverse)


def _layer_norm_backward(
    epsilon: float, saved: Saved, gradient: Float[Array, "... D"]
) -> tuple[Array, Array, Array]:
    """With `h = (x - mean) / deviation` and `g = scale * gradient`:
    `dx = (g - mean(g) - h mean(g h)) / deviation`."""
    del epsilon
    x, scale, mean, inverse = saved
    normed = (x - mean) * inverse
    scaled = gradient * scale
    mean_of, mean_along = materialize(
        (
            scaled.mean(axis=-1, keepdims=True),
            (scaled * normed).mean(axis=-1, keepdims=True),
        )
    )
    tokens = tuple(range(x.ndim - 1))
    return (
        inverse * (scaled - mean_of - normed * mean_along),
        (gradient * normed).sum(axis=tokens),
        gradient.sum(axis=tokens),
    )


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
