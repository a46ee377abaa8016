"""Decoding with trained models."""

from jax_transformer.decoding.generate import Completion, TextGenerator
from jax_transformer.decoding.greedy import greedy_decode
from jax_transformer.decoding.sampling import make_strategy
from jax_transformer.decoding.transcribe import Transcriber
from jax_transformer.decoding.translate import Translator

__all__ = [
    "Completion",
    "TextGenerator",
    "Transcriber",
    "Translator",
    "greedy_decode",
    "make_strategy",
]
