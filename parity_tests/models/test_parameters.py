"""A model as trees, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_transformer.errors import InputError
from jax_transformer.layers.block import EncoderLayer
from jax_transformer.models.parameters import (
    cast,
    count_parameters,
    flatten,
    split,
    unflatten,
)
from parity_tests.harness import fresh, make_pair
from parity_tests.models.test_encoder_decoder import CONFIG

TREE = {"a": {"layers": {0: jnp.ones(2), 10: jnp.zeros(3)}}, "b": jnp.ones((2, 1))}


def test_leaves_have_dotted_names():
    assert list(flatten(TREE)) == ["a.layers.0", "a.layers.10", "b"]


def test_unflattening_undoes_flattening():
    back = unflatten(flatten(TREE), TREE)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    assert all(one is other for one, other in zip(*map(jax.tree.leaves, (back, TREE)), strict=True))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"c": jnp.ones(1)}, "unknown c"),
        ({"b": None}, "missing b"),
        ({"b": jnp.ones((1, 2))}, r"b is \[1, 2\], must be \[2, 1\]"),
    ],
)
def test_leaves_that_do_not_fit_are_refused(change, problem):
    leaves = {k: v for k, v in (flatten(TREE) | change).items() if v is not None}
    with pytest.raises(InputError, match=problem) as refusal:
        unflatten(leaves, TREE)
    assert "\n" not in str(refusal.value)


def test_tables_that_are_not_trained_are_buffers():
    _, model = make_pair(CONFIG)
    _, params, buffers = split(model)
    assert set(flatten(buffers)) == {"encoder.pos_encoding.pe", "decoder.pos_encoding.pe"}
    assert count_parameters(model) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_merging_undoes_splitting():
    model = fresh(lambda: EncoderLayer(4, 2, 6, rngs=nnx.Rngs(0)))
    graphdef, params, buffers = split(model)
    _, again, _ = split(nnx.merge(graphdef, params, buffers))
    jax.tree.map(np.testing.assert_array_equal, params, again)


def test_only_floating_point_leaves_are_cast():
    tree = cast({"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32)}, jnp.bfloat16)
    assert tree["a"].dtype == jnp.bfloat16
    assert tree["b"].dtype == jnp.int32
