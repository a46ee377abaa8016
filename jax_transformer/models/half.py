"""One half of an encoder-decoder: embeddings with positions, layers, and a norm."""

import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jax_transformer.config import (
    AudioConfig,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    LayerConfig,
)
from jax_transformer.layers.audio import AudioEmbedding
from jax_transformer.layers.block import Block
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.linear import Embedding
from jax_transformer.layers.normalization import make_norm
from jax_transformer.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from jax_transformer.layers.position_bias import RelativePositionBias, alibi_bias

AnyConfig = DecoderOnlyConfig | EncoderOnlyConfig | EncoderDecoderConfig


class Half(nnx.Module):
    """What encoder and decoder have in common: `norm(layers(embed(tokens)))` with
    `embed(x) = dropout(embedding_norm(embedding(x) scale + pe))`.

    Positions, both norms and the scale are there or not by configuration. Without a `vocab_size`
    there is no table, and the caller gives one; with `audio` the embedding and the positions are
    those of sound.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        layer: LayerConfig,
        num_layers: int,
        vocab_size: int | None,
        audio: AudioConfig | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        d_model = layer.d_model
        self.position = config.position
        self.num_heads = layer.num_heads
        self.scale = embedding_scale(config, d_model)
        if audio is not None:
            self.embedding = AudioEmbedding(d_model, audio.num_mel_bins, rngs=rngs)
            self.pos_encoding = SinusoidalPositionalEncoding(
                d_model, audio.max_len, 0.0, halves=True, endpoint=True
            )
        else:
            self.embedding = (
                None if vocab_size is None else Embedding(vocab_size, d_model, rngs=rngs)
            )
            self.pos_encoding = position_encoding_layer(
                config, d_model, config.sinusoid_halves, rngs=rngs
            )
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer, rngs=rngs)
        self.layers = nnx.List(
            [Block(layer, cross_attention=layer.causal, rngs=rngs) for _ in range(num_layers)]
        )
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.final_dropout = Dropout(layer.dropout if config.final_dropout else 0.0)

    def embed(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B frames mels"],
        positions: Int[Array, "B T"] | None = None,
        *,
        embedding: Embedding | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What goes into the first layer."""
        table = self.embedding if embedding is None else embedding
        if table is None:
            raise TypeError("an encoder without a table of its own needs one: embedding=...")
        x = table(tokens) * self.scale
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x, dropout_key)

    def bias(
        self,
        x: Float[Array, "B T D"],
        query_positions: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B S"] | None,
    ) -> Float[Array, "#B N T S"] | None:
        """What positions (default 0, 1, ... as many as in x) add to the scores of every layer."""
        if self.position not in ("alibi", "t5"):
            return None
        first = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        query_positions = first if query_positions is None else query_positions
        key_positions = first if key_positions is None else key_positions
        if self.position_bias is not None:
            return self.position_bias(query_positions, key_positions)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return alibi_bias(query_positions, key_positions, self.num_heads, wide)

    def finish(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        """What comes after the last layer."""
        x = x if self.norm is None else self.norm(x)
        return self.final_dropout(x, dropout_key)


def embedding_scale(config: AnyConfig, d_model: int) -> float:
    """What embeddings are multiplied by."""
    return math.sqrt(d_model) if config.embedding_scale is True else config.embedding_scale or 1.0


def position_encoding_layer(
    config: AnyConfig, d_model: int, halves: bool = False, *, rngs: nnx.Rngs
) -> SinusoidalPositionalEncoding | LearnedPositionalEncoding | None:
    """What adds positions to the embeddings, without a dropout of its own."""
    if config.position == "learned":
        return LearnedPositionalEncoding(
            d_model, config.max_len, 0.0, config.position_offset, rngs=rngs
        )
    if config.position == "sinusoidal":
        return SinusoidalPositionalEncoding(d_model, config.max_len, 0.0, halves)
    return None


def position_bias_layer(
    config: AnyConfig, layer: LayerConfig, *, rngs: nnx.Rngs
) -> RelativePositionBias | None:
    """T5's trained bias, of both directions in an encoder. (ALiBi has no parameters.)"""
    if config.position != "t5":
        return None
    return RelativePositionBias(
        layer.num_heads,
        config.relative_buckets,
        config.relative_max_distance,
        not layer.causal,
        rngs=rngs,
    )
