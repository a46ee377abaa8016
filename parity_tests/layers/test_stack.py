"""Stacked layers are the listed ones: same outputs, gradients and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.layers.block import PreNormEncoderLayer
from jax_transformer.layers.stack import apply_layers, stack_layers, unstack_layers
from jax_transformer.models.parameters import flatten, split
from parity_tests.harness import QUICK, fresh, to_numpy
from parity_tests.inputs import SOURCE_MASK, B, D, F, N, S, normal

DEPTH = 3


class Stack(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([PreNormEncoderLayer(D, N, F, 0.3, rngs=rngs) for _ in range(DEPTH)])


def run(graphdef, params, x, dropout_key):
    layers = nnx.merge(graphdef, params)
    if isinstance(layers, Stack):
        layers = layers.layers
    mask = jnp.asarray(SOURCE_MASK)
    return apply_layers(
        layers, lambda layer, x, key: layer(x, mask, dropout_key=key)[0], x, dropout_key
    )


def test_listed_and_stacked_layers_agree_in_outputs_gradients_and_dropout():
    dropout_key = jax.random.key(7)
    with jax.enable_x64(True):
        model = fresh(Stack, jnp.float64)
        graphdef, params, _ = split(model)
        one, _, _ = split(model.layers[0])
        x = jnp.asarray(normal(B, S, D), jnp.float64)
        vector = jnp.asarray(normal(B, S, D, seed=1), jnp.float64)

        def value_and_gradients(graphdef, params):
            def both(params, x):
                output, pull = jax.vjp(
                    lambda params, x: run(graphdef, params, x, dropout_key), params, x
                )
                return *pull(vector), output

            return jax.jit(both, compiler_options=QUICK)(params, x)

        listed = value_and_gradients(graphdef, params)
        stacked = value_and_gradients(one, stack_layers(params)["layers"])
    gradients = unstack_layers({"layers": stacked[0]}, params)
    pairs = {f"parameter {k}": (v, flatten(gradients)[k]) for k, v in flatten(listed[0]).items()}
    pairs |= {"input": (listed[1], stacked[1]), "output": (listed[2], stacked[2])}
    for name, (first, second) in pairs.items():
        # The same operations in the same order, fused differently: a few ulp.
        scale = np.abs(to_numpy(pairs[name.replace("k_proj.bias", "k_proj.kernel")][0])).max()
        np.testing.assert_allclose(
            to_numpy(second), to_numpy(first), rtol=0, atol=1e-14 * scale * S * D, err_msg=name
        )


def test_layers_have_masks_of_their_own():
    x = jnp.ones((1, 2, 4))
    seen = []

    def body(layer, x, key):
        seen.append(key)
        return x

    apply_layers(nnx.List([nnx.Module(), nnx.Module()]), body, x, jax.random.key(0))
    first, second = (jax.random.key_data(key) for key in seen)
    assert not np.array_equal(first, second)


def test_unstacking_undoes_stacking_bit_for_bit():
    def layer(seed):
        return {"a": {"kernel": normal(2, 3, seed=seed)}, "bias": normal(4, seed=seed)}

    tree = {
        "encoder": {"layers": {0: layer(0), 1: layer(1), 2: layer(2)}, "norm": normal(2)},
        "scalar": normal(),
    }
    stacked = stack_layers(tree)
    assert stacked["encoder"]["layers"]["a"]["kernel"].shape == (3, 2, 3)
    assert stacked["encoder"]["norm"] is tree["encoder"]["norm"]
    back = unstack_layers(stacked, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name, leaf in flatten(tree).items():
        np.testing.assert_array_equal(flatten(back)[name], leaf, err_msg=name)


def test_layers_stack_in_the_order_of_their_numbers():
    tree = {"layers": {index: {"w": np.float32(index)} for index in reversed(range(12))}}
    np.testing.assert_array_equal(stack_layers(tree)["layers"]["w"], np.arange(12))
