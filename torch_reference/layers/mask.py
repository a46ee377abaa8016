"""Boolean attention masks, True = may attend, shaped to broadcast over `[B, N, T, S]`."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from jax_transformer.errors import InputError


def create_padding_mask(seq: Int[Tensor, "B S"], pad_idx: int = 0) -> Bool[Tensor, "B 1 1 S"]:
    """Hide the keys whose token is `pad_idx`.

    Wrong where the padding id is also a real token (a pad id equal to the end of sentence, say):
    `create_length_mask` is not.
    """
    return (seq != pad_idx)[:, None, None, :]


def create_look_ahead_mask(
    size: int, device: torch.device | None = None
) -> Bool[Tensor, "1 1 T T"]:
    """Let position t see the keys 0..t."""
    return torch.tril(torch.ones(size, size, dtype=torch.bool, device=device))[None, None]


def create_decoder_mask(tgt: Int[Tensor, "B T"], pad_idx: int = 0) -> Bool[Tensor, "B 1 T T"]:
    """`create_padding_mask` and `create_look_ahead_mask` at once."""
    return create_padding_mask(tgt, pad_idx) & create_look_ahead_mask(tgt.shape[1], tgt.device)


def create_length_mask(lengths: Int[Tensor, " B"], size: int) -> Bool[Tensor, "B 1 1 S"]:
    """Let every query see the first `lengths[b]` of `size` keys (right padding)."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]


def create_decoder_length_mask(lengths: Int[Tensor, " B"], size: int) -> Bool[Tensor, "B 1 T T"]:
    """`create_length_mask` and `create_look_ahead_mask` at once."""
    return create_length_mask(lengths, size) & create_look_ahead_mask(size, lengths.device)


def create_causal_mask(
    query_positions: Int[Tensor, "#B T"],
    key_positions: Int[Tensor, "#B S"],
    window: int | None = None,
    query_segments: Int[Tensor, "#B T"] | None = None,
    key_segments: Int[Tensor, "#B S"] | None = None,
    key_valid: Bool[Tensor, "#B S"] | None = None,
) -> Bool[Tensor, "#B 1 T S"]:
    """Let the query at position i see the keys at positions `i - window < j <= i`.

    Only those of its own segment (a document packed into the row, say), where segments are given,
    and only those that are `key_valid`. Positions are where tokens sit, in a cache or in a row:
    queries that follow a cache of keys see all of it, whatever their number.
    """
    query, key = query_positions[:, None, :, None], key_positions[:, None, None, :]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if query_segments is not None and key_segments is not None:
        mask = mask & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
    if key_valid is not None:
        mask = mask & key_valid[:, None, None, :]
    return mask


def positions_from_padding_mask(mask: Bool[Tensor, "B 1 1 S"]) -> Int[Tensor, "B S"]:
    """Positions that count the real tokens of each row, whichever side its padding is on.

    `max(cumsum(mask) - 1, 0)`: padding on the left is at 0 with the first token.
    """
    return (torch.cumsum(mask[:, 0, 0, :], dim=-1, dtype=torch.int32) - 1).clamp(min=0)


def check_boolean(mask: Shaped[Tensor, "..."]) -> None:
    """Refuse numbers in place of truth values: 0 may mean "hide" or "add nothing".

    Raises:
        InputError: the mask's dtype is not bool.
    """
    if mask.dtype != torch.bool:
        raise InputError(
            f"an attention mask of {mask.dtype}: must be boolean, True where a query may attend"
        )
