"""Whole models."""

from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.encoder_decoder import (
    Decoder,
    Encoder,
    EncoderDecoder,
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)
from jax_transformer.models.encoder_only import EncoderOnly, EncoderOutput
from jax_transformer.models.parameters import cast_model, count_parameters

__all__ = [
    "Decoder",
    "DecoderOnly",
    "Encoder",
    "EncoderDecoder",
    "EncoderOnly",
    "EncoderOutput",
    "Transformer",
    "TransformerDecoder",
    "TransformerEncoder",
    "cast_model",
    "count_parameters",
]
