"""Do two models compute the same numbers, and if not, where and why not."""

from jax_transformer.verification.face import assert_same_function, compare_modules, verify
from jax_transformer.verification.verify import Pair, Report

__all__ = ["Pair", "Report", "assert_same_function", "compare_modules", "verify"]
