"""Encoder and decoder layers, with the norm after each sublayer or before it."""

from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jax_transformer.config import Activation
from jax_transformer.layers.attention import KeyValueStore, MultiHeadAttention
from jax_transformer.layers.dropout import Dropout, fold_keys
from jax_transformer.layers.feedforward import FeedForward
from jax_transformer.layers.normalization import LayerNorm


@runtime_checkable
class LayerStore(Protocol):
    """What a decoder layer remembers between calls (see `decoding.cache`)."""

    self_attn: KeyValueStore
    cross_attn: KeyValueStore


class EncoderLayer(nnx.Module):
    """Post-norm: `x = norm1(x + dropout1(self_attn(x)))`, `x = norm2(x + dropout2(ffn(x)))`.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation, rngs=rngs)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout1 = Dropout(dropout)
        self.dropout2 = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B N S S"]]:
        """Output and self-attention weights."""
        keys = fold_keys(dropout_key, 4)
        attn_out, attn_weights = self.self_attn(x, x, x, src_mask, dropout_key=keys[0])
        x = self.norm1(x + self.dropout1(attn_out, keys[1]))

        ffn_out = self.ffn(x, dropout_key=keys[2])
        x = self.norm2(x + self.dropout2(ffn_out, keys[3]))
        return x, attn_weights


class PreNormEncoderLayer(nnx.Module):
    """Pre-norm: `x = x + dropout(self_attn(norm1(x)))`, `x = x + dropout(ffn(norm2(x)))`.

    Source: Xiong et al. 2020; lecture section 4.2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation, rngs=rngs)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B N S S"]]:
        """Output and self-attention weights."""
        keys = fold_keys(dropout_key, 4)
        normed = self.norm1(x)
        attn_out, attn_weights = self.self_attn(
            normed, normed, normed, src_mask, dropout_key=keys[0]
        )
        x = x + self.dropout(attn_out, keys[1])

        normed = self.norm2(x)
        ffn_out = self.ffn(normed, dropout_key=keys[2])
        x = x + self.dropout(ffn_out, keys[3])
        return x, attn_weights


class DecoderLayer(nnx.Module):
    """Post-norm: causal self-attention, attention to the encoder's output, feed-forward.

    `x = norm1(x + dropout(self_attn(x)))`, `x = norm2(x + dropout(cross_attn(x, enc_output)))`,
    `x = norm3(x + dropout(ffn(x)))`. Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.norm1 = LayerNorm(d_model)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.norm2 = LayerNorm(d_model)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation, rngs=rngs)
        self.norm3 = LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"] | None,
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None = None,
        *,
        cache: LayerStore | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Output and cross-attention weights. `enc_output=None` reads its keys and values from
        the cache."""
        self_cache, cross_cache = (cache.self_attn, cache.cross_attn) if cache else (None, None)
        keys = fold_keys(dropout_key, 6)
        self_attn_out, _ = self.self_attn(x, x, x, tgt_mask, cache=self_cache, dropout_key=keys[0])
        x = self.norm1(x + self.dropout(self_attn_out, keys[1]))

        cross_attn_out, cross_weights = self.cross_attn(
            x, enc_output, enc_output, src_mask, cache=cross_cache, dropout_key=keys[2]
        )
        x = self.norm2(x + self.dropout(cross_attn_out, keys[3]))

        ffn_out = self.ffn(x, dropout_key=keys[4])
        x = self.norm3(x + self.dropout(ffn_out, keys[5]))
        return x, cross_weights


class PreNormDecoderLayer(nnx.Module):
    """Pre-norm: as `DecoderLayer`, each sublayer reading a normed x and adding to x as it is.

    The encoder's output is read as it comes (the encoder ends in a norm of its own).
    Source: Xiong et al. 2020; lecture section 4.2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.norm1 = LayerNorm(d_model)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout, rngs=rngs)
        self.norm2 = LayerNorm(d_model)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation, rngs=rngs)
        self.norm3 = LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"] | None,
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None = None,
        *,
        cache: LayerStore | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """As `DecoderLayer.__call__`."""
        self_cache, cross_cache = (cache.self_attn, cache.cross_attn) if cache else (None, None)
        keys = fold_keys(dropout_key, 6)
        normed = self.norm1(x)
        self_attn_out, _ = self.self_attn(
            normed, normed, normed, tgt_mask, cache=self_cache, dropout_key=keys[0]
        )
        x = x + self.dropout(self_attn_out, keys[1])

        normed = self.norm2(x)
        cross_attn_out, cross_weights = self.cross_attn(
            normed, enc_output, enc_output, src_mask, cache=cross_cache, dropout_key=keys[2]
        )
        x = x + self.dropout(cross_attn_out, keys[3])

        normed = self.norm3(x)
        ffn_out = self.ffn(normed, dropout_key=keys[4])
        x = x + self.dropout(ffn_out, keys[5])
        return x, cross_weights
