"""The components of a Transformer."""

from torch_reference.layers.attention import MultiHeadAttention, dot_product_attention
from torch_reference.layers.audio import AudioEmbedding, Conv1d
from torch_reference.layers.block import (
    Block,
    DecoderLayer,
    EncoderLayer,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
)
from torch_reference.layers.feedforward import FeedForward, GatedFeedForward, gated_width
from torch_reference.layers.linear import OutputProjection
from torch_reference.layers.mask import (
    create_causal_mask,
    create_decoder_length_mask,
    create_decoder_mask,
    create_length_mask,
    create_look_ahead_mask,
    create_padding_mask,
    positions_from_padding_mask,
)
from torch_reference.layers.normalization import LayerNorm, RMSNorm
from torch_reference.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from torch_reference.layers.position_bias import RelativePositionBias, alibi_bias, get_alibi_slopes
from torch_reference.layers.rotary import RotaryPositionalEncoding

__all__ = [
    "AudioEmbedding",
    "Block",
    "Conv1d",
    "DecoderLayer",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "LayerNorm",
    "LearnedPositionalEncoding",
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
