"""A list of equal layers, or the same layers stacked and run by one `lax.scan`.

The list is the canonical layout. Stacked, a parameter of shape `s` becomes `[L, *s]` and the
compiled program holds one layer however deep the model is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jax_transformer.errors import InputError

Tree = Any  # a nested dict of arrays


def apply_layers(
    layers: nnx.List | nnx.Module,
    body: Callable[[Any, Float[Array, "B T D"], Key[Array, ""] | None], Float[Array, "B T D"]],
    x: Float[Array, "B T D"],
    dropout_key: Key[Array, ""] | None,
) -> Float[Array, "B T D"]:
    """`for i, layer: x = body(layer, x, fold_in(dropout_key, i))`, listed or stacked."""
    if isinstance(layers, nnx.List):
        for index, layer in enumerate(layers):
            x = body(layer, x, layer_key(dropout_key, index))
        return x

    graphdef, stacked = nnx.split(layers)

    def step(x: Array, indexed: tuple[Array, nnx.State]) -> tuple[Array, None]:
        index, state = indexed
        return body(nnx.merge(graphdef, state), x, layer_key(dropout_key, index)), None

    depth = jax.tree.leaves(stacked)[0].shape[0]
    return jax.lax.scan(step, x, (jnp.arange(depth), stacked))[0]


def layer_key(dropout_key: Key[Array, ""] | None, index: int | Array) -> Key[Array, ""] | None:
    """The key of layer `index`: the same listed and stacked."""
    return None if dropout_key is None else jax.random.fold_in(dropout_key, index)


def stack_template(model: Any) -> Any:
    """Make `model` take stacked parameters: its list of layers, or its encoder's and its
    decoder's, become one layer each, whose parameters `stack_layers` gives a leading axis. Returns
    the model.

    Raises:
        InputError: layers that are not all alike (windows in some of them, say).
    """
    halves = (model,) if hasattr(model, "layers") else (model.encoder, model.decoder)
    for half in halves:
        if len({layer.config for layer in half.layers}) > 1:
            raise InputError("layers of different kinds cannot be stacked: leave them listed")
        half.layers = half.layers[0]
    return model


def stack_layers(tree: Tree) -> Tree:
    """Stack every list of layers in a nested dict of arrays.

    `{"layers": {0: t0, 1: t1, ...}}` becomes `{"layers": stack(t0, t1, ...)}` along a new first
    axis; everything else stays. Parameters, gradients and optimiser moments are such trees.
    """
    if not isinstance(tree, dict):
        return tree
    if is_layer_list(tree):
        layers = [tree[index] for index in range(len(tree))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {name: stack_layers(child) for name, child in tree.items()}


def unstack_layers(tree: Tree, like: Tree) -> Tree:
    """The inverse of `stack_layers`; `like` is any tree with the canonical structure."""
    if not isinstance(like, dict):
        return tree
    if is_layer_list(like):
        return {index: jax.tree.map(lambda leaf: leaf[index], tree) for index in like}  # noqa: B023
    return {name: unstack_layers(tree[name], child) for name, child in like.items()}


def is_layer_list(tree: dict[Any, Any]) -> bool:
    """Whether the node is a list: its keys are 0, 1, ..."""
    return bool(tree) and all(isinstance(key, int) for key in tree)
