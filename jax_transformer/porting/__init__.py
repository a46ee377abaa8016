"""Weights between PyTorch and JAX, as tables of rules over names and arrays."""

from jax_transformer.porting.plan import convert, convert_back, make_plan
from jax_transformer.porting.rules import Alias, Rule

__all__ = ["Alias", "Rule", "convert", "convert_back", "make_plan"]
