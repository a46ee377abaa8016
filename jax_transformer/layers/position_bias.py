"""Positions as a bias on attention scores: ALiBi, and the buckets of T5."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_transformer.errors import InputError
from jax_transformer.layers.linear import Embedding


def get_alibi_slopes(num_heads: int) -> np.ndarray:
    """The slope of each head, `[N]`: `2^(-8/N), 2^(-16/N), ..., 2^-8` for a power of two.

    Other N take those of the power of two M below and then every other one of 2M's, from the first.
    Source: Press et al. 2022 and its code; BLOOM and MPT do the same.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - power), 2) / power)
    return np.concatenate([slopes, between])


def alibi_bias(
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    num_heads: int,
    dtype: jnp.dtype | type | None = None,
) -> Float[Array, "B N T S"]:
    """`-slope_n |i - j|` for the positions i of queries and j of keys, in `dtype`, None for
    float32.

    From positions, not from places in a batch: the same in a cache and after padding. (BLOOM
    adds `slope_n j`, of which the softmax makes the same for keys that are not ahead.)
    """
    dtype = jnp.dtype(dtype or jnp.float32)
    distance = jnp.abs(query_positions[:, :, None] - key_positions[:, None, :]).astype(dtype)
    slopes = jnp.asarray(get_alibi_slopes(num_heads), dtype)
    return -slopes[:, None, None] * distance[:, None]


def relative_position_bucket(
    relative: Int[Array, "..."],
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Array, "..."]:
    """The bucket of each `relative` = key position - query position, in `[0, num_buckets)`.

    One each for the nearer distances; the others share theirs with ever more, in a geometric
    series up to `max_distance`, and the last has all beyond it. Bidirectional, the upper half of
    the buckets is for keys ahead; else keys ahead count as at distance 0.
    Source: Raffel et al. 2020 and its code.

    Raises:
        InputError: too few buckets, or a distance that they reach without sharing.
    """
    table = jnp.asarray(bucket_table(bidirectional, num_buckets, max_distance))
    behind = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
    bucket = table[jnp.minimum(behind, max_distance)]
    return bucket + num_buckets // 2 * (relative > 0) if bidirectional else bucket


def bucket_table(bidirectional: bool, num_buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance from 0 to `max_distance`, on one side.

    Computed once, in float32 as the original does: no border depends on a compiler's logarithm.
    """
    buckets = num_buckets // 2 if bidirectional else num_buckets
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise InputError(
            f"num_buckets={num_buckets} with max_distance={max_distance}: at least "
            f"{4 if bidirectional else 2} buckets, and a distance above the {exact} that have "
            f"one each, are needed"
        )
    distance = np.arange(max_distance + 1)
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    place = ratio / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    shared = np.minimum(exact + place.astype(np.int32), buckets - 1)
    return np.where(distance < exact, distance, shared).astype(np.int32)


class RelativePositionBias(nnx.Module):
    """`bias[b, n, i, j] = table[bucket(j - i), n]` with a trained table `[num_buckets, N]`.

    One for all the layers of a stack (`relative_position_bucket`). Source: Raffel et al. 2020.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        rngs: nnx.Rngs,
    ):
        bucket_table(bidirectional, num_buckets, max_distance)
        self.relative_attention_bias = Embedding(num_buckets, num_heads, rngs=rngs)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def __call__(
        self, query_positions: Int[Array, "B T"], key_positions: Int[Array, "B S"]
    ) -> Float[Array, "B N T S"]:
        """The bias of each head in the dtype of the table."""
        relative = key_positions[:, None, :] - query_positions[:, :, None]
        bucket = relative_position_bucket(
            relative, self.bidirectional, self.num_buckets, self.max_distance
        )
        batch, length, _ = bucket.shape
        rows = self.relative_attention_bias(bucket.reshape(batch, -1))
        return rows.reshape(batch, length, -1, rows.shape[-1]).transpose(0, 3, 1, 2)
