"""One half of an encoder-decoder: embeddings with positions, layers, and a norm."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.config import (
    AudioConfig,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    EncoderOnlyConfig,
    LayerConfig,
)
from torch_reference.layers.audio import AudioEmbedding
from torch_reference.layers.block import Block
from torch_reference.layers.normalization import make_norm
from torch_reference.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from torch_reference.layers.position_bias import RelativePositionBias, alibi_bias

AnyConfig = DecoderOnlyConfig | EncoderOnlyConfig | EncoderDecoderConfig


class Half(nn.Module):
    """What encoder and decoder have in common: `norm(layers(embed(tokens)))` with
    `embed(x) = dropout(embedding_norm(embedding(x) scale + pe))`.

    Positions, both norms and the scale are there or not by configuration. With `audio` the
    embedding and the positions are those of sound.
    """

    embedding: Any

    def __init__(
        self,
        config: EncoderDecoderConfig,
        layer: LayerConfig,
        num_layers: int,
        vocab_size: int | None,
        audio: AudioConfig | None = None,
    ):
        super().__init__()
        d_model = layer.d_model
        self.position = config.position
        self.num_heads = layer.num_heads
        self.scale = embedding_scale(config, d_model)
        if audio is not None:
            self.embedding = AudioEmbedding(d_model, audio.num_mel_bins)
            self.pos_encoding = SinusoidalPositionalEncoding(
                d_model, audio.max_len, 0.0, halves=True, endpoint=True
            )
        elif vocab_size is not None:
            self.embedding = nn.Embedding(vocab_size, d_model)
            self.pos_encoding = position_encoding_layer(config, d_model, config.sinusoid_halves)
        self.embedding_norm = make_norm(layer, d_model) if config.embedding_norm else None
        self.dropout = nn.Dropout(layer.dropout)
        self.position_bias = position_bias_layer(config, layer)
        self.layers = nn.ModuleList(
            [Block(layer, cross_attention=layer.causal) for _ in range(num_layers)]
        )
        self.norm = make_norm(layer, d_model) if config.final_norm else None
        self.final_dropout = nn.Dropout(layer.dropout if config.final_dropout else 0.0)

    def embed(
        self,
        tokens: Int[Tensor, "B T"] | Float[Tensor, "B frames mels"],
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tokens) * self.scale
        if self.pos_encoding is not None:
            x = self.pos_encoding(x, positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x)

    def bias(
        self,
        x: Float[Tensor, "B T D"],
        query_positions: Int[Tensor, "B T"] | None,
        key_positions: Int[Tensor, "B S"] | None,
    ) -> Float[Tensor, "#B N T S"] | None:
        """What positions (default 0, 1, ... as many as in x) add to the scores of every layer."""
        if self.position not in ("alibi", "t5"):
            return None
        first = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)[None]
        query_positions = first if query_positions is None else query_positions
        key_positions = first if key_positions is None else key_positions
        if self.position_bias is not None:
            return self.position_bias(query_positions, key_positions)
        wide = torch.promote_types(x.dtype, torch.float32)
        return alibi_bias(query_positions, key_positions, self.num_heads, wide)

    def finish(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What comes after the last layer."""
        x = x if self.norm is None else self.norm(x)
        return self.final_dropout(x)


def embedding_scale(config: AnyConfig, d_model: int) -> float:
    """What embeddings are multiplied by."""
    return math.sqrt(d_model) if config.embedding_scale is True else config.embedding_scale or 1.0


def position_encoding_layer(
    config: AnyConfig, d_model: int, halves: bool = False
) -> SinusoidalPositionalEncoding | LearnedPositionalEncoding | None:
    """What adds positions to the embeddings, without a dropout of its own."""
    if config.position == "learned":
        return LearnedPositionalEncoding(d_model, config.max_len, 0.0, config.position_offset)
    if config.position == "sinusoidal":
        return SinusoidalPositionalEncoding(d_model, config.max_len, 0.0, halves)
    return None


def position_bias_layer(config: AnyConfig, layer: LayerConfig) -> RelativePositionBias | None:
    """T5's trained bias, of both directions in an encoder. (ALiBi has no parameters.)"""
    if config.position != "t5":
        return None
    return RelativePositionBias(
        layer.num_heads,
        config.relative_buckets,
        config.relative_max_distance,
        not layer.causal,
    )
