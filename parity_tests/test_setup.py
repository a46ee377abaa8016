"""The suite's own conditions: without them the other tests would pass for too little."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.layers.attention import dot_product_attention
from jax_transformer.layers.linear import Linear
from jax_transformer.layers.mask import create_length_mask
from jax_transformer.models.encoder_decoder import TransformerEncoder
from jax_transformer.training.loss import LossSum, cross_entropy
from jax_transformer.training.optimizer import adam
from jax_transformer.training.schedule import noam_schedule
from jax_transformer.training.step import update_average
from parity_tests.harness import fresh
from torch_reference.layers.attention import dot_product_attention as torch_attention
from torch_reference.layers.mask import create_length_mask as torch_length_mask
from torch_reference.models.encoder_decoder import TransformerEncoder as TorchEncoder
from torch_reference.training.loss import cross_entropy as torch_cross_entropy


def encoder(ids):
    """A model given one axis too few."""
    module = nnx.eval_shape(lambda: TransformerEncoder(5, 4, 1, 4, 1, 9, rngs=nnx.Rngs(0)))
    return module(ids)


WRONG_CALLS = {
    "layers": lambda: create_length_mask(jnp.zeros((2, 2), jnp.int32), 3),
    "layers, sizes that disagree": lambda: dot_product_attention(
        jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 3, 4)), jnp.ones((1, 1, 3, 4))
    ),
    "models": lambda: encoder(jnp.zeros(3, jnp.int32)),
    "models, a dtype": lambda: encoder(jnp.zeros((1, 3))),
    "decoding": lambda: KeyValueCache.empty(jnp.ones((1, 2, 3)), 4),
    "training.loss": lambda: cross_entropy(jnp.ones((1, 2, 3)), jnp.zeros((1, 3), jnp.int32)),
    "training.schedule": lambda: noam_schedule("512"),
    "training.optimizer": lambda: adam(optax.constant_schedule(1.0), b1="0.9"),
    "training.step": lambda: update_average({}, {}, jnp.zeros(2, jnp.int32), 0.5),
    "torch_reference.layers": lambda: torch_length_mask(torch.zeros(2, 2, dtype=torch.int32), 3),
    "torch_reference.layers, sizes that disagree": lambda: torch_attention(
        torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    ),
    "torch_reference.models": lambda: TorchEncoder(5, 4, 1, 4, 1, 9)(torch.zeros(3).int()),
    "torch_reference.training": lambda: torch_cross_entropy(
        torch.ones(1, 2, 3), torch.zeros(1, 3).int()
    ),
}


@pytest.mark.parametrize("package", WRONG_CALLS)
def test_a_wrongly_shaped_argument_raises(package):
    with pytest.raises(jaxtyping.TypeCheckError):
        WRONG_CALLS[package]()


def test_results_are_checked_too():
    with pytest.raises(jaxtyping.TypeCheckError):
        LossSum(jnp.zeros(2), jnp.ones(2)).mean()


# 1 + 2^-12 has one bit more than TF32 keeps, and four more than bfloat16.
PROBE = np.float32(1 + 2.0**-12)
EXACT = 1.000244140625


def products(matmul, einsum, attention, asarray):
    """A 128 x 128 matrix of the probe times the identity, in three ways."""
    matrix = asarray(np.full((128, 128), PROBE))
    identity = asarray(np.eye(128, dtype=np.float32))
    yield matmul(matrix, identity)
    yield einsum("ij,jk->ik", matrix, identity)
    # Each query finds its own key, and the weights are exactly 0 and 1.
    query = 1e4 * identity[None, :, None, :]
    yield attention(query, query, asarray(np.full((1, 128, 1, 128), PROBE)))[0]


def test_products_are_in_full_precision():
    assert jax.config.jax_default_matmul_precision == "highest"
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    ours = products(jnp.matmul, jnp.einsum, dot_product_attention, jnp.asarray)
    theirs = products(torch.matmul, torch.einsum, torch_attention, torch.from_numpy)
    for product in (*ours, *theirs):
        np.testing.assert_array_equal(product, np.float32(EXACT))


@pytest.mark.parametrize("bits", [7, 10], ids=["bfloat16", "TF32"])
def test_the_probe_shows_rounded_factors(bits):
    def rounded(array):
        return jax.lax.reduce_precision(jnp.asarray(array), 8, bits)

    for product in products(jnp.matmul, jnp.einsum, dot_product_attention, rounded):
        np.testing.assert_array_equal(product, np.float32(1.0))


@pytest.mark.parametrize("name", ["attention", "linear"])
def test_every_product_of_the_layers_asks_for_full_precision(name):
    # On a GPU or TPU this is what decides: none is left to the default.
    if name == "attention":
        heads = jnp.ones((1, 2, 1, 2))
        program = jax.make_jaxpr(lambda x: dot_product_attention(x, x, x))(heads)
    else:
        module = fresh(lambda: Linear(2, 3, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(jax.grad(lambda x: module(x).sum()))(jnp.ones((1, 2, 2)))
    text = str(program)
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST") > 0
