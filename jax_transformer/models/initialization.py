"""GPT-2's initialisation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from jax_transformer.layers.linear import Embedding, Linear, OutputProjection

STD = 0.02

RESIDUAL = ("out_proj", "linear2", "down_proj")
"""The projections that end a sublayer: what they give is added to the residual stream."""


def residual_std(num_layers: int) -> float:
    """`0.02 / sqrt(2L)` for the projections that end the 2L sublayers, so that the residual stream
    is as large after any number of layers. Source: Radford et al. 2019, section 2.3."""
    return STD / math.sqrt(2 * num_layers)


def initialize_normal(
    model: nnx.Module,
    *,
    embedding_std: float = STD,
    residual_std: float = STD,
    rngs: nnx.Rngs,
) -> None:
    """Draw every kernel and table of `model` anew, N(0, 0.02^2), and set the biases of its affine
    maps to zero; norms stay.

    The table `embedding` has a deviation of its own, and so have the projections that end a
    sublayer. Source: OpenAI's gpt-2 code.
    """
    # One key for all: each that `rngs` gives is costly to trace.
    key = rngs.params()
    for index, (path, module) in enumerate(nnx.iter_modules(model)):
        name = path[-1] if path else ""
        own_key = jax.random.fold_in(key, index)
        if isinstance(module, Embedding):
            std = embedding_std if path == ("embedding",) else STD
            module.embedding = normal(module.embedding, std, own_key)
        elif isinstance(module, Linear | OutputProjection):
            if module.kernel is not None:
                std = residual_std if name in RESIDUAL else STD
                module.kernel = normal(module.kernel, std, own_key)
            if module.bias is not None:
                module.bias = nnx.Param(jnp.zeros_like(module.bias[...]))


def normal(like: nnx.Param, std: float, key: Key[Array, ""]) -> nnx.Param:
    """N(0, std^2) in the shape and dtype of another parameter."""
    values = like[...]
    return nnx.Param(std * jax.random.normal(key, values.shape, values.dtype))
