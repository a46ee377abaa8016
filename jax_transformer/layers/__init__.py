"""The components of a Transformer."""

from jax_transformer.layers.attention import MultiHeadAttention, dot_product_attention
from jax_transformer.layers.block import (
    Block,
    DecoderLayer,
    EncoderLayer,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
)
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.feedforward import FeedForward
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
from jax_transformer.layers.normalization import LayerNorm
from jax_transformer.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)

__all__ = [
    "Block",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "EncoderLayer",
    "FeedForward",
    "LayerNorm",
    "LearnedPositionalEncoding",
    "Linear",
    "MultiHeadAttention",
    "OutputProjection",
    "PreNormDecoderLayer",
    "PreNormEncoderLayer",
    "SinusoidalPositionalEncoding",
    "create_causal_mask",
    "create_decoder_length_mask",
    "create_decoder_mask",
    "create_length_mask",
    "create_look_ahead_mask",
    "create_padding_mask",
    "dot_product_attention",
    "positions_from_padding_mask",
]
