"""A user's own pair of modules, and models in files."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten, split, unflatten
from jax_transformer.porting.operations import AddConstant
from jax_transformer.porting.plan import Plan, Table, make_plan, run, sources_of
from jax_transformer.verification.capture import as_numpy
from jax_transformer.verification.function import Function, nested
from jax_transformer.verification.inputs import Arrays
from jax_transformer.verification.pair import Pair
from jax_transformer.verification.pairs import verify_pair
from jax_transformer.verification.result import Report
from jax_transformer.verification.training.recipe import Recipe, Training
from jax_transformer.verification.training.recorded import Carry, Tensors


def verify(
    ours: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    *,
    dtype: str | None = "float32",
    backward: bool = False,
    steps: int = 0,
    recipe: Recipe | None = None,
    decode: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Compare a model of this library with the one it was made from, on inputs that reveal.

    Args:
        ours: a run, a ported directory, or any checkpoint that `port` takes.
        reference: a `.pt` of the lecture document's script or of `torch_reference`, another run or
            ported directory, or a Hugging Face folder, which `transformers` loads.
        dtype: of the run that accuracy is measured in; None: float64 alone.
        backward: gradients too.
        steps: of training, in float64 from the same state on the same batches; 0: none. Each side
            then has its parameters, gradients and moments in memory, ours twice.
        recipe: how both sides are trained.
        decode: continue prompts on both sides, with caches and without, the most likely tokens.
        progress: is told what is done next.

    Raises:
        InputError: files that cannot be read, models that cannot be given the same inputs, or a
            negative number of steps.
    """
    if steps < 0:
        raise InputError(f"steps={steps}: must be at least 1, or 0 for no training")
    from jax_transformer.verification.reference import load_pair

    progress("loading both models")
    pair = load_pair(Path(ours), Path(reference), steps=steps, recipe=recipe, decode=decode)
    return verify_pair(pair, dtype=dtype, backward=backward, progress=progress)


def compare_modules(
    torch_module: Any,
    jax_callable: nnx.Module | Callable[..., Any],
    mapping: Table,
    inputs: Arrays,
    *,
    parameters: Any = None,
    modules: Mapping[str, str] = MappingProxyType({}),
    torch_call: Callable[..., Any] = lambda module, *inputs: module(*inputs),
    valid: np.ndarray | None = None,
    dtype: str | None = "float32",
    backward: bool = False,
    training: Training | None = None,
) -> Report:
    """Compare a pair of modules that need not be of this library.

    The JAX side gets the weights of the PyTorch one through `mapping`; which of their modules
    correspond follows from where these go: those that hold parameters, and numbered ones (layers)
    that hold the same ones. A function's modules are the points that it names with `point`, and
    those of `flax.linen`.

    Args:
        torch_module: an `nn.Module`; it is left as it is.
        jax_callable: an `nnx.Module`, called as `jax_callable(*inputs)` (it is left as it is, and
            its parameters need not be real: `nnx.eval_shape`), or a function, called as
            `jax_callable(parameters, *inputs)`.
        mapping: porting rules from PyTorch's names to those of the JAX side.
        inputs: arrays, or None.
        parameters: of a function: any pytree of arrays or shapes, whose names are paths with dots;
            None: dicts in dicts, by the names of the mapping.
        modules: further modules that correspond: PyTorch's names to those of the JAX side.
        torch_call: how the PyTorch side is called with tensors, and what of its result counts.
        valid: `[B, T]`, True at the tokens that count; None: all.
        dtype: of the run that accuracy is measured in; None: float64 alone.
        backward: gradients too.
        training: how both sides are trained, and on what; None: they are not.

    Raises:
        InputError: a JAX side that cannot be called, or rules that do not fit the two.
    """
    tensors = {name: as_numpy(tensor) for name, tensor in torch_module.state_dict().items()}
    jax_module = as_module(jax_callable, parameters, mapping, tensors, inputs)
    plan = make_plan(mapping, tensors, target_shapes(jax_module, mapping, tensors))
    weights = run(plan, tensors)
    names = module_names(plan) | dict(modules)
    pair = Pair(
        ours=with_weights(jax_module, weights),
        theirs=torch_module,
        inputs=tuple(inputs),
        rename=names.get,
        their_weights=weights,
        torch_call=torch_call,
        valid=valid,
        carry=carrier(plan),
        training=training,
    )
    return verify_pair(pair, dtype=dtype, backward=backward)


def as_module(
    jax_callable: Any,
    parameters: Any,
    mapping: Table,
    tensors: Mapping[str, np.ndarray],
    inputs: Arrays,
) -> nnx.Module:
    """The JAX side as a module.

    Raises:
        InputError: it is neither a module nor a function, or a module with `parameters`.
    """
    if isinstance(jax_callable, nnx.Module):
        if parameters is not None:
            raise InputError("parameters= is for a function: a module has its own")
        return jax_callable
    if not callable(jax_callable):
        raise InputError(
            f"jax_callable is a {type(jax_callable).__name__}: give an nnx.Module, or a "
            f"function of parameters and inputs"
        )
    if parameters is None:
        parameters = nested(run(make_plan(mapping, tensors, None), tensors))
    return Function(jax_callable, parameters, tuple(inputs))


def assert_same_function(
    torch_module: Any,
    jax_callable: nnx.Module | Callable[..., Any],
    mapping: Table,
    inputs: Arrays,
    **options: Any,
) -> None:
    """Raise unless the two modules compute the same function, as accurately; the message is the
    diagnosis. Arguments are those of `compare_modules`.

    Raises:
        AssertionError: they do not.
        InputError: they cannot be compared.
    """
    report = compare_modules(torch_module, jax_callable, mapping, inputs, **options)
    if not report.same:
        raise AssertionError(explanation(report))


def explanation(report: Report) -> str:
    """The verdict, and a line for each further difference."""
    lines = [report.verdict]
    lines += [f"`{each.module}`: {each.sentence}" for each in report.diagnoses[1:]]
    lines += [part.verdict for part in report.parts if part.verdict not in report.verdict]
    lines += [problem for problem in report.problems if problem not in report.verdict]
    return "\n".join(lines)


def carrier(plan: Plan) -> Carry:
    """Takes gradients and moments of parameters where the plan takes the parameters: nothing
    is added to them there."""
    moves = tuple(
        dataclasses.replace(
            move,
            operations=tuple(each for each in move.operations if not isinstance(each, AddConstant)),
        )
        for move in plan.moves
    )

    def carry(tensors: Mapping[str, np.ndarray]) -> Tensors:
        known = (move for move in moves if all(name in tensors for name in move.sources))
        return run(dataclasses.replace(plan, moves=tuple(known), tied={}), tensors)

    return carry


def target_shapes(
    model: nnx.Module, mapping: Table, tensors: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, and of those buffers that the reference has too."""
    _, params, buffers = split(model)
    shapes = {name: leaf.shape for name, leaf in flatten(params).items()}
    for name, leaf in flatten(buffers).items():
        sources = sources_of(mapping, name)
        if sources and all(source in tensors for source in sources):
            shapes[name] = leaf.shape
    return shapes


def with_weights(model: nnx.Module, weights: Mapping[str, np.ndarray]) -> nnx.Module:
    """A copy of the model with these parameters and buffers, floating-point ones in float32."""
    graphdef, params, buffers = split(model)

    def filled(tree: Any) -> Any:
        leaves = flatten(tree)
        given = {name: as_leaf(weights[name]) for name in leaves if name in weights}
        return unflatten(leaves | given, tree)

    return nnx.merge(graphdef, filled(params), filled(buffers))


def as_leaf(value: np.ndarray) -> Any:
    """In float32 where it is of floating point."""
    return jnp.asarray(value, jnp.float32 if np.issubdtype(value.dtype, np.floating) else None)


def module_names(plan: Plan) -> dict[str, str]:
    """From PyTorch's modules to ours: those whose parameters go to one of ours, and numbered ones
    whose parameters are all of one of ours."""
    ways = [(move.sources, move.targets) for move in plan.moves]
    found: dict[str, str] = {}
    for depth_first in (leaf_modules(ways), numbered_modules(ways)):
        for theirs, ours in depth_first:
            found.setdefault(theirs, ours)
    return found


Ways = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]


def owner(name: str) -> str:
    """The module of a parameter."""
    return name.rpartition(".")[0]


def leaf_modules(ways: Ways) -> list[tuple[str, str]]:
    """Modules with parameters of their own that correspond one to one, and so does what is inside
    them."""
    pairs = {(owner(s), owner(t)) for sources, targets in ways for s in sources for t in targets}
    theirs, ours = [one for one, _ in pairs], [two for _, two in pairs]
    return [
        (one, two)
        for one, two in pairs
        if one
        and theirs.count(one) == 1
        and ours.count(two) == 1
        and all(s.startswith(f"{one}.") == t.startswith(f"{two}.") for s, t in pairs)
    ]


def numbered_modules(ways: Ways) -> list[tuple[str, str]]:
    """`h.0` and `layers.0`: numbered on both sides, with the same parameters in them."""
    theirs, ours = inside(ways, 0), inside(ways, 1)
    same = {members: module for module, members in ours.items()}
    return [(module, same[members]) for module, members in theirs.items() if members in same]


def inside(ways: Ways, side: int) -> dict[str, frozenset[int]]:
    """Numbered module -> the ways that begin (or end) in it, all of whose tensors are its own."""
    found: dict[str, set[int]] = {}
    for index, way in enumerate(ways):
        for prefix in numbered_prefixes(way[side][0]):
            if all(name.startswith(f"{prefix}.") for name in way[side]):
                found.setdefault(prefix, set()).add(index)
    return {prefix: frozenset(members) for prefix, members in found.items()}


def numbered_prefixes(name: str) -> list[str]:
    """`layers.0.ffn.linear1.weight -> ["layers.0"]`."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdigit()]
