"""Dropout with an explicit key: `torch.nn.Dropout` in a functional world."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, UInt32


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
        return drop(self.rate, x, jax.random.key_data(key))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def drop(rate: float, x: Float[Array, "..."], words: UInt32[Array, " K"]) -> Float[Array, "..."]:
    """Dropout of x by the mask of `words`, which the backward pass draws again: at two
    multiplications a number that is cheaper than storing it."""
    return jnp.where(keep_mask(words, rate, x.shape), x * (1.0 / (1.0 - rate)), 0.0)


def _drop_forward(
    rate: float, x: Float[Array, "..."], words: UInt32[Array, " K"]
) -> tuple[Float[Array, "..."], UInt32[Array, " K"]]:
    return drop(rate, x, words), words


def _drop_backward(
    rate: float, words: UInt32[Array, " K"], gradient: Float[Array, "..."]
) -> tuple[Float[Array, "..."], np.ndarray]:
    return drop(rate, gradient, words), np.zeros(words.shape, jax.dtypes.float0)


drop.defvjp(_drop_forward, _drop_backward)


def keep_mask(
    words: UInt32[Array, " K"], rate: float, shape: tuple[int, ...]
) -> Bool[Array, "..."]:
    """True with probability `1 - rate` (to 2**-32): element i is a hash of i and a key's words.

    A counter-based generator like the Threefry of `jax.random`, with a hash of two
    multiplications a round in place of its twenty rounds: drawing masks with `jax.random` is a
    tenth of a training step on a CPU. Each element depends on its index alone, so masks do not
    change with the devices that they are sharded over.
    """
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    bits = hash_bits(hash_bits(index ^ words[0]) + words[1])
    return bits >= jnp.uint32(round(rate * 2**32))


def hash_bits(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which each input bit flips each output bit with
    probability close to 1/2 ("lowbias32", Wellons 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)


def fold_keys(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """`count` keys for the places inside a layer; all None (no dropout) when `key` is."""
    if key is None:
        return [None] * count
    return [jax.random.fold_in(key, place) for place in range(count)]
