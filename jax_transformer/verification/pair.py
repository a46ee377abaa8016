"""Two models and what both are given."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_transformer.verification.decoding.task import Decoding
from jax_transformer.verification.inputs import Arrays
from jax_transformer.verification.training.recipe import Training
from jax_transformer.verification.training.recorded import Carry


def call(model: Any, *inputs: Any) -> Any:
    """The model's own result."""
    return model(*inputs)


def encoded(model: Any, *inputs: Any) -> Any:
    """Of an `EncoderOnly`, of this library or of `torch_reference`, the logits of masked tokens, or
    the hidden states of one that gives none."""
    found = model(*inputs)
    return found.hidden if found.logits is None else found.logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models and what both are given.

    The JAX side is called as `jax_call(model, *inputs)`, the PyTorch side as `torch_call(model,
    *inputs)` with the inputs as tensors; both give logits, or whatever is compared in the end.
    """

    ours: nnx.Module
    theirs: Any
    """An `nn.Module`."""
    inputs: Arrays
    rename: Callable[[str], str | None] = lambda name: name
    """From PyTorch's names of modules to ours; None for those that we do not have."""
    their_weights: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """The reference's parameters under our names, in our layout."""
    jax_call: Callable[..., Any] = call
    torch_call: Callable[..., Any] = call
    valid: np.ndarray | None = None
    """`[B, T]`, the tokens that count; None: all."""
    carry: Carry = dict
    """Tensors like the reference's parameters, under its names, into ours: layout only."""
    training: Training | None = None
    """How both sides are trained; None: they are not."""
    decoding: Decoding | None = None
    """What both sides are to continue; None: nothing."""
