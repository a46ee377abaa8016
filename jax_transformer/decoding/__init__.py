"""Decoding with trained models."""

from jax_transformer.decoding.greedy import greedy_decode
from jax_transformer.decoding.translate import Translator

__all__ = ["Translator", "greedy_decode"]
