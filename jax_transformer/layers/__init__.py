"""The components of a Transformer."""

from jax_transformer.layers.attention import MultiHeadAttention, dot_product_attention
from jax_transformer.layers.audio import AudioEmbedding, Conv1d
from jax_transformer.layers.block import (
    Block,
    DecoderLayer,
    EncoderLayer,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
)
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.feedforward import FeedForward, GatedFeedForward, gated_width
from jax_transformer.layers.linear import Embedding, Linear, OutputProjection
from jax_transformer.layers.mask import (
    create_causal_mask,
    create_decoder_length_mask,
    create_decoder_mask,
    create_length_mask,
    create_look_ahead_mask,
    create_padding_mask,
    positions_from_padding_mask,
)
from jax_transformer.layers.normalization import LayerNorm, RMSNorm
from jax_transformer.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from jax_transformer.layers.position_bias import RelativePositionBias, alibi_bias, get_alibi_slopes
from jax_transformer.layers.rotary import RotaryPositionalEncoding

__all__ = [
    "AudioEmbedding",
    "Block",
    "Conv1d",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "LayerNorm",
    "LearnedPositionalEncoding",
    "Linear",
    "MultiHeadAttention",
    "OutputProjection",
    "PreNormDecoderLayer",
    "PreNormEncoderLayer",
    "RMSNorm",
    "RelativePositionBias",
    "RotaryPositionalEncoding",
    "SinusoidalPositionalEncoding",
    "alibi_bias",
    "create_causal_mask",
    "create_decoder_length_mask",
    "create_decoder_mask",
    "create_length_mask",
    "create_look_ahead_mask",
    "create_padding_mask",
    "dot_product_attention",
    "gated_width",
    "get_alibi_slopes",
    "positions_from_padding_mask",
]
