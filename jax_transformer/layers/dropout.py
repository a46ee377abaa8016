"""Dropout with an explicit key: `torch.nn.Dropout` in a functional world."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key


class Dropout(nnx.Module):
    """`y = x * m / (1 - rate)`, m Bernoulli(1 - rate), elementwise (Srivastava et al. 2014).

    Without a key the layer is the identity, which is PyTorch's `eval()`. The same key gives the
    same mask: callers derive one for each place with `jax.random.fold_in`, so that no mask
    depends on the order of calls.
    """

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(
        self, x: Float[Array, "..."], key: Key[Array, ""] | None = None
    ) -> Float[Array, "..."]:
        if key is None or self.rate == 0.0:
            return x
        keep = keep_mask(key, self.rate, x.shape)
        return jnp.where(keep, x / (1.0 - self.rate), jnp.zeros_like(x))


def keep_mask(key: Key[Array, ""], rate: float, shape: tuple[int, ...]) -> jax.Array:
    """True with probability `1 - rate`, from 16 random bits an element.

    The rate is rounded to a multiple of 2**-16; half the bits cost half the time, and drawing
    them is a tenth of a training step on a CPU.
    """
    bits = jax.random.bits(key, shape, jnp.uint16)
    return bits >= jnp.uint16(round(rate * 2**16))


def fold_keys(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """`count` keys for the places inside a layer; all None (no dropout) when `key` is."""
    if key is None:
        return [None] * count
    return [jax.random.fold_in(key, place) for place in range(count)]
