"""Normalisation over the features of each token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_transformer.config import LayerConfig
from jax_transformer.layers.fusion import materialize


class LayerNorm(nnx.Module):
    """`y = scale * (x - mean(x)) / sqrt(var(x) + epsilon) + bias` over the last axis, or without
    the bias.

    Mean and (biased) variance are taken in float32 or wider, in two passes, whatever the dtype
    of x. `epsilon` is PyTorch's 1e-5; Flax's own default is 1e-6. Source: Ba et al. 2016; lecture
    section 4.1. PyTorch calls `scale` `weight`.
    """

    def __init__(self, d_model: int, epsilon: float = 1e-5, bias: bool = True):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(d_model, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(d_model, jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale = self.scale[...].astype(wide)
        bias = None if self.bias is None else self.bias[...].astype(wide)
        return layer_norm(self.epsilon, x.astype(wide), scale, bias).astype(x.dtype)


Saved = tuple[Array, Array, Array, Array, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_norm(
    epsilon: float,
    x: Float[Array, "... D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
) -> Float[Array, "... D"]:
    """The formula of `LayerNorm`; its derivative is written out below to save x and one mean and
    deviation a token, where autodiff saves four arrays of the size of x."""
    return _layer_norm_forward(epsilon, x, scale, bias)[0]


def _layer_norm_forward(
    epsilon: float,
    x: Float[Array, "... D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
) -> tuple[Float[Array, "... D"], Saved]:
    mean = x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
    mean, inverse = materialize((mean, jax.lax.rsqrt(variance + epsilon)))
    normed = (x - mean) * inverse * scale
    return normed if bias is None else normed + bias, (x, scale, mean, inverse, bias)


def _layer_norm_backward(
    epsilon: float, saved: Saved, gradient: Float[Array, "... D"]
) -> tuple[Array, Array, Array | None]:
    """With `h = (x - mean) / deviation` and `g = scale * gradient`:
    `dx = (g - mean(g) - h mean(g h)) / deviation`."""
    del epsilon
    x, scale, mean, inverse, bias = saved
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
        None if bias is None else gradient.sum(axis=tokens),
    )


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class RMSNorm(nnx.Module):
    """`y = scale * x / sqrt(mean(x^2) + epsilon)` over the last axis, with no bias.

    The mean is taken in float32 or wider whatever the dtype of x. With `unit_offset` the factor is
    `1 + scale`, added in float32 (Gemma), and `scale` starts at 0. The quotient is rounded to the
    dtype of x before the factor (Llama), or after it with `scale_in_float32` (Gemma).
    Source: Zhang and Sennrich 2019; lecture section 4.1. PyTorch calls `scale` `weight`.
    """

    def __init__(
        self,
        d_model: int,
        epsilon: float = 1e-8,
        unit_offset: bool = False,
        scale_in_float32: bool = False,
    ):
        self.epsilon = epsilon
        self.unit_offset = unit_offset
        self.scale_in_float32 = scale_in_float32
        initial = jnp.zeros if unit_offset else jnp.ones
        self.scale = nnx.Param(initial(d_model, jnp.float32))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale = self.scale[...].astype(wide)
        if self.unit_offset:
            scale = 1.0 + scale
        if self.scale_in_float32 or x.dtype == wide:
            return rms_norm(self.epsilon, x.astype(wide), scale).astype(x.dtype)
        normed = rms_norm(self.epsilon, x.astype(wide), jnp.ones_like(scale)).astype(x.dtype)
        # float32 holds the product of two narrow numbers exactly: rounded once, as in theirs.
        return (normed.astype(wide) * scale).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rms_norm(
    epsilon: float, x: Float[Array, "... D"], scale: Float[Array, " D"]
) -> Float[Array, "... D"]:
    """The formula of `RMSNorm`; its derivative is written out below to save x and one number a
    token."""
    return _rms_norm_forward(epsilon, x, scale)[0]


def _rms_norm_forward(
    epsilon: float, x: Float[Array, "... D"], scale: Float[Array, " D"]
) -> tuple[Float[Array, "... D"], tuple[Array, Array, Array]]:
    mean_square = jnp.square(x).mean(axis=-1, keepdims=True)
    inverse = materialize(jax.lax.rsqrt(mean_square + epsilon))
    return x * inverse * scale, (x, scale, inverse)


def _rms_norm_backward(
    epsilon: float, saved: tuple[Array, Array, Array], gradient: Float[Array, "... D"]
) -> tuple[Array, Array]:
    """With `r = 1 / rms` and `p = gradient * x`: `dx = r scale gradient - x r^3 mean(scale p)`,
    `dscale = sum(r p)`; the two sums over p are products with vectors, twice as fast on a CPU as
    sums of which each multiplies again."""
    del epsilon
    x, scale, inverse = saved
    product = materialize(gradient * x)
    along = jnp.matmul(product, scale, precision="highest")[..., None] / x.shape[-1]
    along = materialize(along * inverse**3)
    d_scale = jnp.matmul(inverse.reshape(-1), product.reshape(-1, x.shape[-1]), precision="highest")
    return gradient * scale * inverse - x * along, d_scale


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def make_norm(config: LayerConfig, width: int) -> LayerNorm | RMSNorm:
    """The norm of that configuration, over `width` features."""
    if config.norm == "layer":
        return LayerNorm(width, config.norm_epsilon, bias=config.norm_bias)
    return RMSNorm(
        width,
        config.norm_epsilon,
        unit_offset=config.norm_unit_offset,
        scale_in_float32=config.norm_scale_in_float32,
    )
