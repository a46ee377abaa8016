"""Do two models compute the same numbers, and if not, where and why not."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.verification.face import assert_same_function, compare_modules, verify
    from jax_transformer.verification.function import point
    from jax_transformer.verification.inputs import Batch
    from jax_transformer.verification.pair import Pair
    from jax_transformer.verification.result import Report
    from jax_transformer.verification.training.recipe import Recipe, Training

PLACES = {
    "Batch": "inputs",
    "Pair": "pair",
    "Recipe": "training.recipe",
    "Report": "result",
    "Training": "training.recipe",
    "assert_same_function": "face",
    "compare_modules": "face",
    "point": "function",
    "verify": "face",
}

__all__ = [
    "Batch",
    "Pair",
    "Recipe",
    "Report",
    "Training",
    "assert_same_function",
    "compare_modules",
    "point",
    "verify",
]


def __getattr__(name: str) -> Any:
    """What needs JAX, when it is asked for."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{PLACES[name]}"), name)
