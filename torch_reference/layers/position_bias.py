"""Positions as a bias on attention scores: ALiBi, and the buckets of T5."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.errors import InputError


def get_alibi_slopes(num_heads: int) -> Float[Tensor, " N"]:
    """The slope of each head, `[N]`: `2^(-8/N), 2^(-16/N), ..., 2^-8` for a power of two.

    Other N take those of the power of two M below and then every other one of 2M's, from the first.
    Source: Press et al. 2022 and its code; BLOOM and MPT do the same.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * torch.arange(1, power + 1).double() / power)
    between = 2.0 ** (-4.0 * torch.arange(num_heads - power).double().mul(2).add(1) / power)
    return torch.cat([slopes, between])


def alibi_bias(
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B S"],
    num_heads: int,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "B N T S"]:
    """`-slope_n |i - j|` for the positions i of queries and j of keys, in `dtype`, None for
    float32.

    From positions, not from places in a batch: the same in a cache and after padding. (BLOOM
    adds `slope_n j`, of which the softmax makes the same for keys that are not ahead.)
    """
    dtype = dtype or torch.float32
    distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs().to(dtype)
    slopes = get_alibi_slopes(num_heads).to(distance)
    return -slopes[:, None, None] * distance[:, None]


def relative_position_bucket(
    relative: Int[Tensor, "..."],
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Tensor, "..."]:
    """The bucket of each `relative` = key position - query position, in `[0, num_buckets)`.

    One each for the nearer distances; the others share theirs with ever more, in a geometric
    series up to `max_distance`, and the last has all beyond it. Bidirectional, the upper half of
    the buckets is for keys ahead; else keys ahead count as at distance 0.
    Source: Raffel et al. 2020 and its code.

    Raises:
        InputError: too few buckets, or a distance that they reach without sharing.
    """
    table = bucket_table(bidirectional, num_buckets, max_distance).to(relative.device)
    behind = relative.abs() if bidirectional else (-relative).clamp(min=0)
    bucket = table[behind.clamp(max=max_distance)]
    return bucket + num_buckets // 2 * (relative > 0) if bidirectional else bucket


def bucket_table(
    bidirectional: bool, num_buckets: int, max_distance: int
) -> Int[Tensor, " distances"]:
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
    distance = torch.arange(max_distance + 1)
    ratio = torch.log(distance.clamp(min=1).float() / exact)
    place = ratio / math.log(max_distance / exact) * (buckets - exact)
    shared = (exact + place.int()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, shared).int()


class RelativePositionBias(nn.Module):
    """`bias[b, n, i, j] = table[bucket(j - i), n]` with a trained table `[num_buckets, N]`.

    One for all the layers of a stack (`relative_position_bucket`). Source: Raffel et al. 2020.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
    ):
        super().__init__()
        bucket_table(bidirectional, num_buckets, max_distance)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(
        self, query_positions: Int[Tensor, "B T"], key_positions: Int[Tensor, "B S"]
    ) -> Float[Tensor, "B N T S"]:
        """The bias of each head in the dtype of the table."""
        relative = key_positions[:, None, :] - query_positions[:, :, None]
        bucket = relative_position_bucket(
            relative, self.bidirectional, self.num_buckets, self.max_distance
        )
        return self.relative_attention_bias(bucket).permute(0, 3, 1, 2)
