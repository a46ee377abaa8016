"""Weights between PyTorch and JAX, as tables of rules over names and arrays."""

from jax_transformer.porting.plan import (
    Header,
    Plan,
    convert,
    convert_back,
    make_plan,
    make_plan_back,
)
from jax_transformer.porting.rules import Alias, Computed, Ignore, Rule

__all__ = [
    "Alias",
    "Computed",
    "Header",
    "Ignore",
    "Plan",
    "Rule",
    "convert",
    "convert_back",
    "make_plan",
    "make_plan_back",
]
