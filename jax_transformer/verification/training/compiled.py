"""Programs that run a few times."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.verification.inputs import Batch

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiler options with which XLA compiles for a CPU in a quarter of the time."""


class Shapes:
    """Shapes and dtypes of arguments, as the key of a compiled program."""

    def __init__(self, *arguments: Any):
        self.structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        leaves, structure = jax.tree.flatten(self.structs)
        self._key = (tuple(leaves), structure)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shapes) and self._key == other._key


def quickly(function: Any, shapes: Shapes) -> Any:
    """A jitted function, compiled for a few runs."""
    options = QUICK if jax.default_backend() == "cpu" else None
    return function.lower(*shapes.structs).compile(compiler_options=options)


def as_arrays(batch: Batch) -> Batch:
    """On the device, floating-point numbers in float64."""
    return jax.tree.map(
        lambda a: jnp.asarray(a, jnp.float64 if np.issubdtype(a.dtype, np.floating) else None),
        batch,
    )
