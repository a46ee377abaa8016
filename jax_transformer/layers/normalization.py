"""Normalisation over the features of each token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


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
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = wide.mean(axis=-1, keepdims=True)
        centred = wide - mean
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normed * self.scale[...] + self.bias[...]).astype(x.dtype)
