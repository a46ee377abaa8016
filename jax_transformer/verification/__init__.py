"""Do two models compute the same numbers, and if not, where and why not."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.verification.face import assert_same_function, compare_modules, verify
    from jax_transformer.verification.pairs import Pair, Report

__all__ = ["Pair", "Report", "assert_same_function", "compare_modules", "verify"]


def __getattr__(name: str) -> Any:
    """What needs JAX, when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_transformer.verification import face, pairs

    return getattr(face if hasattr(face, name) else pairs, name)
