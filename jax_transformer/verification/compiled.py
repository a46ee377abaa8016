"""Programs that run a few times."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.verification.inputs import Batch

QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}
"""Compiler options with which XLA compiles for a CPU in a quarter of the time."""


class Programs:
    """The last few programs that were compiled: pairs that differ in the reference alone share
    them."""

    def __init__(self, size: int = 16):
        self.size = size
        self._known: dict[Any, Any] = {}

    def run(self, make: Callable[..., Any], settings: tuple[Any, ...], *arguments: Any) -> Any:
        """The result of the function `make(*settings)`.

        In float64 it is compiled quickly; in narrower dtypes, where accuracy is measured, as users
        compile it.
        """
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = (make, settings, structure, shapes)
        if key not in self._known:
            self._known[key] = compiled(make(*settings), structure, leaves)
            if len(self._known) > self.size:
                self._known.pop(next(iter(self._known)))
        program, result = self._known[key]
        return jax.tree.unflatten(result, program(*leaves))


def compiled(function: Callable[..., Any], structure: Any, leaves: list[Any]) -> tuple[Any, Any]:
    """A program over the leaves of the arguments, and the structure of what it gives."""
    results = []

    def flat(*leaves: Any) -> list[Any]:
        found, result = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        results.append(result)
        return found

    quick = jax.default_backend() == "cpu" and jax.config.read("jax_enable_x64")
    program = jax.jit(flat).lower(*leaves).compile(compiler_options=QUICK if quick else None)
    return program, results[-1]


PROGRAMS = Programs()


def as_arrays(batch: Batch) -> Batch:
    """On the device, floating-point numbers in float64."""
    return jax.tree.map(
        lambda a: jnp.asarray(a, jnp.float64 if np.issubdtype(a.dtype, np.floating) else None),
        batch,
    )
