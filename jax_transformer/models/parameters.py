"""A model as plain trees: what jit, optax, checkpoints and porting work on."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_transformer.errors import InputError

# A nested dict of arrays, lists of layers under the keys 0, 1, ...
Tree = Any
Model = TypeVar("Model", bound=nnx.Module)


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Tree, Tree]:
    """The structure, the parameters and the buffers of `model`; `nnx.merge` is the inverse.

    The trees are nested dicts of arrays (layers under integer keys): the hot loops run plain
    `jax.jit` over them, without the host time of `nnx.jit`.
    """
    graphdef, params, buffers = nnx.split(model, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def cast(tree: Tree, dtype: jax.typing.DTypeLike) -> Tree:
    """Every floating-point leaf in `dtype`: the dtype of a model's parameters is the one it
    computes in."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def cast_model(model: Model, dtype: jax.typing.DTypeLike) -> Model:
    """A copy of `model` with parameters and buffers in `dtype`."""
    graphdef, params, buffers = split(model)
    return nnx.merge(graphdef, cast(params, dtype), cast(buffers, dtype))


def count_parameters(model: nnx.Module) -> int:
    """The number of trained scalars; a tied table counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def flatten(tree: Tree) -> dict[str, Any]:
    """Leaves by dotted name: `encoder.layers.0.self_attn.q_proj.kernel`."""
    leaves = jax.tree.flatten_with_path(tree)[0]
    return {".".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}


def unflatten(flat: dict[str, Any], like: Tree) -> Tree:
    """The tree of the structure of `like` with the leaves of `flat`.

    Raises:
        InputError: a name too many or too few, or a leaf of another shape; all in one line.
    """
    wanted = flatten(like)
    problems = [f"unknown {name}" for name in flat if name not in wanted]
    problems += [f"missing {name}" for name in wanted if name not in flat]
    problems += [
        f"{name} is {list(flat[name].shape)}, must be {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in flat and flat[name].shape != leaf.shape
    ]
    if problems:
        raise InputError(f"the parameters do not fit the model: {'; '.join(problems)}")
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in wanted])
