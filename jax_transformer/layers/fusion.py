"""Where XLA's CPU compiler has to be told what to compute once."""

from typing import TypeVar

import jax

Arrays = TypeVar("Arrays")


def materialize(x: Arrays) -> Arrays:
    """The identity; on a CPU also a border that no fusion crosses.

    XLA's CPU compiler fuses a cheap-looking producer (a transpose, `exp`, `erf`, a mean) into
    each of its consumers and computes it again for each of their elements. GPU and TPU compilers
    weigh that better and are left alone.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)
