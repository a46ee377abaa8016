"""Whole models."""

from jax_transformer.models.encoder_decoder import (
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)
from jax_transformer.models.parameters import cast_model, count_parameters

__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerEncoder",
    "cast_model",
    "count_parameters",
]
