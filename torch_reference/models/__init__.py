"""Whole models."""

from torch_reference.models.decoder_only import DecoderOnly
from torch_reference.models.encoder_decoder import (
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)
from torch_reference.models.encoder_only import EncoderOnly, EncoderOutput

__all__ = [
    "DecoderOnly",
    "EncoderOnly",
    "EncoderOutput",
    "Transformer",
    "TransformerDecoder",
    "TransformerEncoder",
]
