"""Cases, and what both frameworks make of them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_transformer.models.parameters import split
from parity_tests.harness.weights import (
    Tensors,
    carry,
    carry_back,
    parameters_of,
    randomize,
    to_numpy,
)

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiler options that compile a model four times as fast, for the many variants of one whose
parts are compiled as users compile them elsewhere."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A JAX callable, its PyTorch counterpart, and what both are given."""

    name: str
    jax: Callable[..., Any]
    """A function or an NNX module class."""
    torch: Callable[..., Any]
    """A function or an `nn.Module` class."""
    inputs: Mapping[str, np.ndarray | None]
    """In the order of the arguments; floating-point ones are differentiated."""
    arguments: tuple[Any, ...] = ()
    """Of the constructor, for modules."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments: of the constructor for modules, of the call for functions."""
    place: str | None = None
    """Where the module sits in a Transformer: the name that the porting rules know it by.
    None for functions."""

    def __str__(self) -> str:
        return self.name


REGISTRY: list[Case] = []
"""Every case that a test module declares; `test_mirror` asks which classes are among them."""


def declare(*cases: Case) -> list[Case]:
    """Register cases and return them, for `pytest.mark.parametrize`."""
    REGISTRY.extend(cases)
    return list(cases)


def make_reference(case: Case, stored: torch.dtype = torch.float32) -> torch.nn.Module | None:
    """The PyTorch module in evaluation mode, weights rounded to `stored`; None for functions."""
    if case.place is None:
        return None
    reference = case.torch(*case.arguments, **case.options).eval()
    randomize(reference)
    return reference.to(stored)


def is_float(array: Any) -> bool:
    return array is not None and np.issubdtype(np.asarray(array).dtype, np.floating)


def rounded(array: np.ndarray, stored: torch.dtype) -> np.ndarray:
    return to_numpy(torch.from_numpy(array).to(stored)).astype(np.float64)


def cotangent(index: int, shape: tuple[int, ...]) -> np.ndarray:
    """The vector of the vector-Jacobian product for output `index`."""
    return np.random.default_rng(100 + index).standard_normal(shape).astype(np.float32)


@functools.cache
def run_torch(case: Case, dtype: torch.dtype, stored: torch.dtype = torch.float32) -> Tensors:
    """Outputs and gradients in `dtype`, from weights and inputs exact in `stored`."""
    reference = make_reference(case, stored)
    call, kwargs = case.torch, case.options
    if reference is not None:
        call, kwargs = reference.to(dtype), {}
    tensors = [
        None
        if array is None
        else torch.from_numpy(rounded(array, stored)).to(dtype).requires_grad_()
        if is_float(array)
        else torch.from_numpy(array)
        for array in case.inputs.values()
    ]
    outputs = torch.utils._pytree.tree_leaves(call(*tensors, **kwargs))
    results = {f"output {i}": to_numpy(output) for i, output in enumerate(outputs)}
    leaves = {} if reference is None else parameters_of(reference)
    leaves |= {
        f"input {name}": tensor
        for name, tensor in zip(case.inputs, tensors, strict=True)
        if tensor is not None and tensor.requires_grad
    }
    total = sum(
        (output * torch.from_numpy(cotangent(i, output.shape)).to(output.dtype)).sum()
        for i, output in enumerate(outputs)
        if output.is_floating_point()
    )
    if leaves and isinstance(total, torch.Tensor):
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            value = torch.zeros_like(leaf) if gradient is None else gradient
            results[f"gradient of {name}"] = to_numpy(value)
    return results


def run_jax(
    case: Case, dtype: Any, mode: str = "jit", stored: torch.dtype = torch.float32
) -> Tensors:
    """As `run_torch`. `mode`: `jit`, as users compile; `quick`, compiled faster; `op by op`."""
    with jax.enable_x64(dtype == jnp.float64):
        reference = make_reference(case, stored)
        arrays = {
            name: None
            if array is None
            else jnp.asarray(rounded(array, stored), dtype)
            if is_float(array)
            else jnp.asarray(array)
            for name, array in case.inputs.items()
        }
        floats = {name: array for name, array in arrays.items() if is_float(case.inputs[name])}
        others = {name: array for name, array in arrays.items() if name not in floats}
        if reference is None:
            graphdef, params, buffers = None, {}, {}
        else:
            module = carry(reference, functools.partial(build, case), case.place, dtype)
            graphdef, params, buffers = split(module)

        def run(params: Any, floats: Any, buffers: Any, others: Any) -> Any:
            def forward(params: Any, floats: Any) -> list[jax.Array]:
                inputs = [(floats | others)[name] for name in case.inputs]
                if graphdef is None:
                    return jax.tree.leaves(case.jax(*inputs, **case.options))
                return jax.tree.leaves(nnx.merge(graphdef, params, buffers)(*inputs))

            outputs, pull = jax.vjp(forward, params, floats)
            vectors = [
                jnp.asarray(cotangent(i, out.shape), out.dtype)
                if jnp.issubdtype(out.dtype, jnp.floating)
                else np.zeros(out.shape, jax.dtypes.float0)
                for i, out in enumerate(outputs)
            ]
            return outputs, pull(vectors)

        if mode != "op by op":
            run = jax.jit(run, compiler_options=QUICK if mode == "quick" else None)
        outputs, (of_params, of_floats) = run(params, floats, buffers, others)
        results = {f"output {i}": to_numpy(output) for i, output in enumerate(outputs)}
        gradients = {} if reference is None else carry_back(of_params, reference, case.place)
        gradients |= {f"input {name}": to_numpy(value) for name, value in of_floats.items()}
        return results | {f"gradient of {name}": value for name, value in gradients.items()}


def build(case: Case) -> nnx.Module:
    """The JAX module, freshly initialised."""
    takes_rngs = "rngs" in inspect.signature(case.jax.__init__).parameters
    return case.jax(
        *case.arguments, **case.options, **({"rngs": nnx.Rngs(0)} if takes_rngs else {})
    )
