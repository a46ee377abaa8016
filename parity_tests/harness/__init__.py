"""The two frameworks side by side: the same weights and inputs, outputs and gradients compared.

A `Case` names a JAX module or function, its PyTorch counterpart and the inputs. `run_torch` and
`run_jax` give every output, and the vector-Jacobian product of every parameter and every
floating-point input, under PyTorch's names. Two criteria judge them:

- same function (`assert_same_function`): both in float64 agree to 1e-12, norm-wise;
- as accurate (`assert_as_accurate`): in float32 the rms error of JAX against the float64 run is
  at most twice PyTorch's (in bfloat16 1.2 times), plus 4 ulp at the tensor's scale.
"""

from parity_tests.harness.cases import (
    QUICK,
    REGISTRY,
    Case,
    declare,
    make_skeleton,
    run_jax,
    run_torch,
)
from parity_tests.harness.criteria import (
    assert_as_accurate,
    assert_same_function,
    check_bfloat16,
    check_float32,
    check_float64,
    rms,
    scale_of,
)
from parity_tests.harness.weights import (
    carry,
    carry_back,
    fresh,
    make_pair,
    pair,
    parameters_of,
    randomize,
    to_numpy,
    unchecked,
)

__all__ = [
    "QUICK",
    "REGISTRY",
    "Case",
    "assert_as_accurate",
    "assert_same_function",
    "carry",
    "carry_back",
    "check_bfloat16",
    "check_float32",
    "check_float64",
    "declare",
    "fresh",
    "make_pair",
    "make_skeleton",
    "pair",
    "parameters_of",
    "randomize",
    "rms",
    "run_jax",
    "run_torch",
    "scale_of",
    "to_numpy",
    "unchecked",
]
