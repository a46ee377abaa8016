"""Whole models."""

from torch_reference.models.decoder_only import DecoderOnly
from torch_reference.models.encoder_decoder import (
    Decoder,
    Encoder,
    EncoderDecoder,
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)
from torch_reference.models.encoder_only import EncoderOnly, EncoderOutput

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
]
