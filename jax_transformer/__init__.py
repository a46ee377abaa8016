"""A Transformer library written twice, in JAX/Flax and in PyTorch."""

from jax_transformer.config import ModelConfig
from jax_transformer.errors import InputError

__all__ = ["InputError", "ModelConfig"]
