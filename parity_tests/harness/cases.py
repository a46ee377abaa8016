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
    """A function, an NNX module class, or a function that makes a module."""
    torch: Callable[..., Any]
    """A function, an `nn.Module` class, or a function that makes a module."""
    inputs: Mapping[str, np.ndarray | None]
    """In the order of the arguments; floating-point ones are differentiated."""
    arguments: tuple[Any, ...] = ()
    """Of the constructor, for modules."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments: of the constructor for modules, of the call for functions."""
    place: str | None = None
    """The name of the module, which tells the porting rules what it is (a norm's has `norm` in it,
    a table's `embedding`). None for functions."""

    def __str__(self) -> str:
        return self.name


REGISTRY: list[Case] = []
"""Every case that a test module declares; `test_mirror` asks which classes are among them."""


def declare(*cases: Case) -> list[Case]:
    """Register cases and return them, for `pytest.mark.parametrize`."""
    REGISTRY.extend(cases)
    return list(cases)


@functools.cache
def make_reference(case: Case, draw: int, stored: torch.dtype) -> torch.nn.Module | None:
    """The PyTorch module in evaluation mode, weights rounded to `stored` (so that it may be cast
    to and fro between wider dtypes); None for functions."""
    if case.place is None:
        return None
    reference = case.torch(*case.arguments, **case.options).eval()
    randomize(reference, draw)
    return reference.to(stored)


@functools.cache
def make_skeleton(case: Case) -> nnx.Module | None:
    """The JAX module with shapes in place of parameters; None for functions."""
    if case.place is None:
        return None
    maker = case.jax.__init__ if inspect.isclass(case.jax) else case.jax
    takes_rngs = "rngs" in inspect.signature(maker).parameters

    def build() -> nnx.Module:
        rngs = {"rngs": nnx.Rngs(0)} if takes_rngs else {}
        return case.jax(*case.arguments, **case.options, **rngs)

    return nnx.eval_shape(build)


def is_float(array: Any) -> bool:
    return array is not None and np.issubdtype(np.asarray(array).dtype, np.floating)


def rounded(array: np.ndarray, stored: torch.dtype) -> np.ndarray:
    return to_numpy(torch.from_numpy(array).to(stored)).astype(np.float64)


def vector(draw: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """The vector of the vector-Jacobian product for output `index`."""
    return np.random.default_rng([draw, index]).standard_normal(shape).astype(np.float32)


def pool(results: list[Tensors]) -> Tensors:
    """The draws of each tensor behind one another."""
    return {name: np.stack([result[name] for result in results]) for name in results[0]}


def run_torch(
    case: Case, dtype: torch.dtype, stored: torch.dtype = torch.float32, draws: int = 1
) -> Tensors:
    """Outputs and gradients in `dtype`, from weights and inputs exact in `stored`."""
    return pool([run_torch_once(case, dtype, stored, draw) for draw in range(draws)])


@functools.cache
def run_torch_once(case: Case, dtype: torch.dtype, stored: torch.dtype, draw: int) -> Tensors:
    """One draw of weights and vectors."""
    reference = make_reference(case, draw, stored)
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
    leaves = torch.utils._pytree.tree_leaves(call(*tensors, **kwargs))
    outputs = [leaf for leaf in leaves if leaf is not None]
    results = {f"output {i}": to_numpy(output) for i, output in enumerate(outputs)}
    leaves = {} if reference is None else parameters_of(reference)
    leaves |= {
        f"input {name}": tensor
        for name, tensor in zip(case.inputs, tensors, strict=True)
        if tensor is not None and tensor.requires_grad
    }
    total = sum(
        (output * torch.from_numpy(vector(draw, i, output.shape)).to(output.dtype)).sum()
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
    case: Case,
    dtype: Any,
    mode: str = "jit",
    stored: torch.dtype = torch.float32,
    draws: int = 1,
) -> Tensors:
    """As `run_torch`. `mode`: `jit`, as users compile; `quick`, compiled faster; `op by op`."""
    with jax.enable_x64(dtype == jnp.float64):
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
        skeleton = make_skeleton(case)
        graphdef = None if skeleton is None else split(skeleton)[0]

        def run(params: Any, floats: Any, buffers: Any, others: Any, vectors: Any) -> Any:
            def forward(params: Any, floats: Any) -> list[jax.Array]:
                inputs = [(floats | others)[name] for name in case.inputs]
                if graphdef is None:
                    return jax.tree.leaves(case.jax(*inputs, **case.options))
                return jax.tree.leaves(nnx.merge(graphdef, params, buffers)(*inputs))

            outputs, pull = jax.vjp(forward, params, floats)
            pulled = [
                vector.astype(output.dtype)
                if jnp.issubdtype(output.dtype, jnp.floating)
                else np.zeros(output.shape, jax.dtypes.float0)
                for vector, output in zip(vectors, outputs, strict=True)
            ]
            return outputs, pull(pulled)

        if mode != "op by op":
            run = jax.jit(run, compiler_options=QUICK if mode == "quick" else None)
        results = []
        for draw in range(draws):
            reference, params, buffers = make_reference(case, draw, stored), {}, {}
            if reference is not None:
                _, params, buffers = split(carry(reference, skeleton, case.place, dtype))
            shapes = output_shapes(case)
            vectors = [jnp.asarray(vector(draw, i, shape)) for i, shape in enumerate(shapes)]
            outputs, (of_params, of_floats) = run(params, floats, buffers, others, vectors)
            result = {f"output {i}": to_numpy(output) for i, output in enumerate(outputs)}
            gradients = {} if reference is None else carry_back(of_params, reference, case.place)
            gradients |= {f"input {name}": to_numpy(value) for name, value in of_floats.items()}
            results.append(result | {f"gradient of {n}": value for n, value in gradients.items()})
        return pool(results)


def output_shapes(case: Case) -> list[tuple[int, ...]]:
    results = run_torch_once(case, torch.float64, torch.float32, 0)
    return [value.shape for name, value in results.items() if name.startswith("output ")]
