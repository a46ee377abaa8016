"""Two models and what both are given."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_transformer.verification.inputs import Arrays
from jax_transformer.verification.training.recipe import Training
from jax_transformer.verification.training.recorded import Carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models and what both are given.

    The JAX side is called as `model(*inputs)`, the PyTorch side as `torch_call(model, *inputs)`
    with the inputs as tensors; both give logits, or whatever is compared in the end.
    """

    ours: nnx.Module
    theirs: Any
    """An `nn.Module`."""
    inputs: Arrays
    rename: Callable[[str], str | None] = lambda name: name
    """From PyTorch's names of modules to ours; None for those that we do not have."""
    their_weights: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """The reference's parameters under our names, in our layout."""
    torch_call: Callable[..., Any] = lambda model, *inputs: model(*inputs)
    valid: np.ndarray | None = None
    """`[B, T]`, the tokens that count; None: all."""
    carry: Carry = dict
    """Tensors like the reference's parameters, under its names, into ours: layout only."""
    training: Training | None = None
    """How both sides are trained; None: they are not."""
