"""Whole models."""

from torch_reference.models.encoder_decoder import (
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)

__all__ = ["Transformer", "TransformerDecoder", "TransformerEncoder"]
