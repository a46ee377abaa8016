"""Boolean attention masks, True = may attend, shaped to broadcast over `[B, N, T, S]`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jax_transformer.errors import InputError


def create_padding_mask(seq: Int[Array, "B S"], pad_idx: int = 0) -> Bool[Array, "B 1 1 S"]:
    """Hide the keys whose token is `pad_idx`.

    Wrong where the padding id is also a real token (a pad id equal to the end of sentence, say):
    models here take masks from `create_length_mask`.
    """
    return (seq != pad_idx)[:, None, None, :]


def create_look_ahead_mask(size: int) -> Bool[Array, "1 1 T T"]:
    """Let position t see the keys 0..t."""
    return jnp.tril(jnp.ones((size, size), dtype=bool))[None, None]


def create_decoder_mask(tgt: Int[Array, "B T"], pad_idx: int = 0) -> Bool[Array, "B 1 T T"]:
    """`create_padding_mask` and `create_look_ahead_mask` at once."""
    return create_padding_mask(tgt, pad_idx) & create_look_ahead_mask(tgt.shape[1])


def create_length_mask(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B 1 1 S"]:
    """Let every query see the first `lengths[b]` of `size` keys (right padding)."""
    return (jnp.arange(size) < lengths[:, None])[:, None, None, :]


def create_decoder_length_mask(lengths: Int[Array, " B"], size: int) -> Bool[Array, "B 1 T T"]:
    """`create_length_mask` and `create_look_ahead_mask` at once."""
    return create_length_mask(lengths, size) & create_look_ahead_mask(size)


def create_causal_mask(
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
    window: int | None = None,
    query_segments: Int[Array, "#B T"] | None = None,
    key_segments: Int[Array, "#B S"] | None = None,
    key_valid: Bool[Array, "#B S"] | None = None,
) -> Bool[Array, "#B 1 T S"]:
    """Let the query at position i see the keys at positions `i - window < j <= i`.

    Only those of its own segment (a document packed into the row, say), where segments are given,
    and only those that are `key_valid`. Positions are where tokens sit, in a cache or in a row:
    queries that follow a cache of keys see all of it, whatever their number.
    """
    query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if query_segments is not None and key_segments is not None:
        mask &= query_segments[:, None, :, None] == key_segments[:, None, None, :]
    if key_valid is not None:
        mask &= key_valid[:, None, None, :]
    return mask


def positions_from_padding_mask(mask: Bool[Array, "B 1 1 S"]) -> Int[Array, "B S"]:
    """Positions that count the real tokens of each row, whichever side its padding is on.

    `max(cumsum(mask) - 1, 0)`: padding on the left is at 0 with the first token.
    """
    return jnp.maximum(jnp.cumsum(mask[:, 0, 0, :], axis=-1, dtype=jnp.int32) - 1, 0)


def check_boolean(mask: Shaped[Array, "..."]) -> None:
    """Refuse numbers in place of truth values: 0 may mean "hide" or "add nothing".

    Raises:
        InputError: the mask's dtype is not bool.
    """
    if mask.dtype != jnp.bool_:
        raise InputError(
            f"an attention mask of {mask.dtype}: must be boolean, True where a query may attend"
        )
