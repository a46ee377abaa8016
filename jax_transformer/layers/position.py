"""Absolute position encodings, added to the embeddings."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_transformer.errors import InputError
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.linear import Embedding, table_rows


class Buffer(nnx.Variable):
    """Saved and ported with the model, never trained: PyTorch's `register_buffer`."""


def sinusoidal_table(
    max_len: int, d_model: int, halves: bool = False, endpoint: bool = False
) -> np.ndarray:
    """`pe[p, 2i] = sin(p / 10000^(2i/D))`, `pe[p, 2i+1] = cos(p / 10000^(2i/D))`, `[max_len, D]`;
    with `halves` all the sines come before all the cosines (Marian); with `endpoint` the last
    frequency is 1/10000 itself, `10000^(i/(D/2 - 1))` in place of `10000^(2i/D)` (Tensor2Tensor,
    Whisper: both).

    In float64: angles of thousands of radians lose four digits in float32. An odd D has one
    cosine column fewer than sines. Source: Vaswani et al. 2017, section 3.5.
    """
    position = np.arange(max_len, dtype=np.float64)[:, None]
    span = max(2 * ((d_model - 1) // 2), 1) if endpoint else d_model
    div_term = np.exp(np.arange(0, d_model, 2, dtype=np.float64) * (-np.log(10000.0) / span))
    pe = np.zeros((max_len, d_model))
    pe[:, 0::2] = np.sin(position * div_term)
    pe[:, 1::2] = np.cos(position * div_term[: d_model // 2])
    return np.concatenate([pe[:, 0::2], pe[:, 1::2]], axis=1) if halves else pe


class SinusoidalPositionalEncoding(nnx.Module):
    """`y = dropout(x + pe[positions])` with the fixed table of `sinusoidal_table`."""

    def __init__(
        self,
        d_model: int,
        max_len: int = 5000,
        dropout: float = 0.1,
        halves: bool = False,
        endpoint: bool = False,
    ):
        self.dropout = Dropout(dropout)
        pe = sinusoidal_table(max_len, d_model, halves, endpoint)[None]
        self.pe = Buffer(jnp.asarray(pe, jnp.float32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """Add the rows of `positions` (default 0, 1, ...).

        Raises:
            InputError: x is longer than the table. Explicit positions outside it are not seen
                here (they are traced values) and give NaN.
        """
        rows = position_rows(self.pe[0], x.shape[1], positions)
        return self.dropout(add_rows(x, rows), dropout_key)


class LearnedPositionalEncoding(nnx.Module):
    """`y = dropout(x + pos_embedding[positions + offset])` with a trained table
    `[max_len + offset, D]`.

    Some models keep rows before that of position 0 (OPT 2 of them; the last of RoBERTa's 2 is that
    of padding, position -1).
    """

    def __init__(
        self,
        d_model: int,
        max_len: int = 512,
        dropout: float = 0.1,
        offset: int = 0,
        *,
        rngs: nnx.Rngs,
    ):
        self.pos_embedding = Embedding(max_len + offset, d_model, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.offset = offset

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """As `SinusoidalPositionalEncoding.__call__`."""
        table = self.pos_embedding.embedding[...]
        rows = position_rows(table, x.shape[1], positions, self.offset)
        return self.dropout(add_rows(x, rows), dropout_key)


def position_rows(
    table: Float[Array, "rows D"],
    length: int,
    positions: Int[Array, "B T"] | None,
    offset: int = 0,
) -> Float[Array, "... T D"]:
    """The rows `positions + offset`, or `length` of them from `offset` on."""
    if length > table.shape[0] - offset:
        raise InputError(
            f"a sequence of {length} tokens is longer than the position table of "
            f"{table.shape[0] - offset} rows: shorten it or raise max_len"
        )
    if positions is None:
        return table[offset : offset + length]
    return table_rows(table, positions + offset)


def add_rows(x: Float[Array, "B T D"], rows: Float[Array, "... T D"]) -> Float[Array, "B T D"]:
    """`x + rows` in the dtype of x; the gradient of the rows is summed in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) + rows.astype(wide)).astype(x.dtype)
