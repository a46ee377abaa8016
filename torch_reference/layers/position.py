"""Absolute position encodings, added to the embeddings."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.errors import InputError


def sinusoidal_table(
    max_len: int, d_model: int, halves: bool = False, endpoint: bool = False
) -> Tensor:
    """`pe[p, 2i] = sin(p / 10000^(2i/D))`, `pe[p, 2i+1] = cos(p / 10000^(2i/D))`, `[max_len, D]`;
    with `halves` all the sines come before all the cosines (Marian); with `endpoint` the last
    frequency is 1/10000 itself, `10000^(i/(D/2 - 1))` in place of `10000^(2i/D)` (Tensor2Tensor,
    Whisper: both).

    In float64: angles of thousands of radians lose four digits in float32. An odd D has one
    cosine column fewer than sines. Source: Vaswani et al. 2017, section 3.5.
    """
    position = torch.arange(max_len, dtype=torch.float64)[:, None]
    span = max(2 * ((d_model - 1) // 2), 1) if endpoint else d_model
    div_term = torch.exp(
        torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / span)
    )
    pe = torch.zeros(max_len, d_model, dtype=torch.float64)
    pe[:, 0::2] = torch.sin(position * div_term)
    pe[:, 1::2] = torch.cos(position * div_term[: d_model // 2])
    return torch.cat([pe[:, 0::2], pe[:, 1::2]], dim=1) if halves else pe


class SinusoidalPositionalEncoding(nn.Module):
    """`y = dropout(x + pe[positions])` with the fixed table of `sinusoidal_table`."""

    pe: Tensor

    def __init__(
        self,
        d_model: int,
        max_len: int = 5000,
        dropout: float = 0.1,
        halves: bool = False,
        endpoint: bool = False,
    ):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        pe = sinusoidal_table(max_len, d_model, halves, endpoint)[None].to(
            torch.get_default_dtype()
        )
        self.register_buffer("pe", pe)

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Add the rows of `positions` (default 0, 1, ...).

        Raises:
            InputError: x is longer than the table.
        """
        rows = position_rows(self.pe[0], x.shape[1], positions)
        return self.dropout(x + rows.to(x.dtype))


class LearnedPositionalEncoding(nn.Module):
    """`y = dropout(x + pos_embedding[positions + offset])` with a trained table
    `[max_len + offset, D]`.

    Some models keep rows before that of position 0 (OPT 2 of them; the last of RoBERTa's 2 is that
    of padding, position -1).
    """

    def __init__(self, d_model: int, max_len: int = 512, dropout: float = 0.1, offset: int = 0):
        super().__init__()
        self.pos_embedding = nn.Embedding(max_len + offset, d_model)
        self.dropout = nn.Dropout(dropout)
        self.offset = offset

    def forward(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """As `SinusoidalPositionalEncoding.forward`."""
        rows = position_rows(self.pos_embedding.weight, x.shape[1], positions, self.offset)
        return self.dropout(x + rows.to(x.dtype))


def position_rows(
    table: Float[Tensor, "rows D"],
    length: int,
    positions: Int[Tensor, "B T"] | None,
    offset: int = 0,
) -> Float[Tensor, "... T D"]:
    """The rows `positions + offset`, or `length` of them from `offset` on."""
    if length > table.shape[0] - offset:
        raise InputError(
            f"a sequence of {length} tokens is longer than the position table of "
            f"{table.shape[0] - offset} rows: shorten it or raise max_len"
        )
    if positions is None:
        return table[offset : offset + length]
    return nn.functional.embedding(positions + offset, table)
