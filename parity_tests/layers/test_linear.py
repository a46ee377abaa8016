"""Affine maps, tables and the projection to logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.layers import linear
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    to_numpy,
)
from parity_tests.inputs import SOURCE, B, D, F, T, V, normal
from torch_reference.layers import linear as reference

CASES = declare(
    # Both ways round: the gradient of a kernel is computed differently for wide and narrow ones.
    *(
        Case(
            name=f"linear {inner} to {outer}",
            jax=linear.Linear,
            torch=torch.nn.Linear,
            arguments=(inner, outer),
            inputs={"x": normal(B, T, inner)},
            place="encoder.layers.0.ffn.linear1",
        )
        for inner, outer in ((D, F), (F, D))
    ),
    Case(
        name="embedding",
        jax=linear.Embedding,
        torch=torch.nn.Embedding,
        arguments=(V, D),
        inputs={"ids": SOURCE},
        place="encoder.embedding",
    ),
    Case(
        name="output projection",
        jax=linear.OutputProjection,
        torch=reference.OutputProjection,
        arguments=(D, V),
        inputs={"x": normal(B, T, D)},
        place="output_proj",
    ),
    Case(
        name="linear without bias",
        jax=linear.Linear,
        torch=torch.nn.Linear,
        arguments=(D, F),
        options={"bias": False},
        inputs={"x": normal(B, T, D)},
        place="linear",
    ),
    Case(
        name="output projection without bias",
        jax=linear.OutputProjection,
        torch=reference.OutputProjection,
        arguments=(D, V),
        options={"bias": False},
        inputs={"x": normal(B, T, D)},
        place="output_proj",
    ),
)


@pytest.mark.parametrize("mode", ["quick", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case, mode):
    check_float64(case, mode)


@pytest.mark.parametrize("mode", ["jit", "op by op"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case, mode):
    check_float32(case, mode)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


@pytest.mark.parametrize("outside", [-1, V, 2**31 - 1])
def test_an_id_outside_the_table_does_not_read_another_row(outside):
    ids = np.array([[0, outside, V - 1]], np.int32)
    embedding = fresh(lambda: linear.Embedding(V, D, rngs=nnx.Rngs(0)))
    rows = to_numpy(jax.jit(lambda ids: embedding(ids))(ids))
    assert np.isnan(rows[0, 1]).all()
    assert np.isfinite(rows[0, [0, 2]]).all()
    with pytest.raises(IndexError):
        torch.nn.Embedding(V, D)(torch.from_numpy(ids))


def test_a_tied_projection_is_the_transpose_of_the_table_unscaled():
    x, table = normal(1, 3, D), normal(V, D, seed=1)
    tied = fresh(lambda: linear.OutputProjection(D, V, tied=True, rngs=nnx.Rngs(0)))
    assert tied.kernel is None
    theirs = reference.OutputProjection(D, V)
    with torch.no_grad():
        theirs.weight = torch.nn.Parameter(torch.from_numpy(table))
        theirs.bias.copy_(torch.from_numpy(to_numpy(tied.bias[...])))
    expected = x.astype(np.float64) @ table.T + to_numpy(tied.bias[...])
    # Sums of 16 products of order 1 in float32.
    np.testing.assert_allclose(tied(jnp.asarray(x), jnp.asarray(table)), expected, atol=1e-5)
    np.testing.assert_allclose(theirs(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-5)


def test_a_tied_projection_asks_for_the_table():
    tied = fresh(lambda: linear.OutputProjection(D, V, tied=True, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="give it the embedding table"):
        tied(jnp.zeros((1, 1, D)))


def test_logits_of_a_bfloat16_model_are_summed_and_kept_in_float32():
    x = normal(1, 2, 512)
    ours = fresh(lambda: linear.OutputProjection(512, V, rngs=nnx.Rngs(0)), jnp.bfloat16)
    theirs = reference.OutputProjection(512, V)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(to_numpy(ours.kernel[...]).T.copy()))
        theirs.bias.copy_(torch.from_numpy(to_numpy(ours.bias[...])))
    theirs = theirs.bfloat16()
    logits = ours(jnp.asarray(x, jnp.bfloat16))
    reference_logits = theirs(torch.from_numpy(x).bfloat16())
    assert logits.dtype == jnp.float32
    assert reference_logits.dtype == torch.float32
    rounded = to_numpy(jnp.asarray(x, jnp.bfloat16)).astype(np.float64)
    exact = rounded @ to_numpy(ours.kernel[...]) + to_numpy(ours.bias[...])
    # float32 sums of 512 products; rounded to bfloat16 they would be off by 1e-2.
    np.testing.assert_allclose(logits, exact, atol=1e-5)
    np.testing.assert_allclose(to_numpy(reference_logits), exact, atol=1e-5)


def test_what_thousands_of_tokens_give_one_parameter_is_summed_in_float32():
    # In bfloat16 a sum of ones stalls at 256.
    ones = jnp.ones((1, 4096, 1), jnp.bfloat16)
    one = fresh(lambda: linear.Linear(1, 1, rngs=nnx.Rngs(0)), jnp.bfloat16)
    table = fresh(lambda: linear.Embedding(2, 1, rngs=nnx.Rngs(0)), jnp.bfloat16)
    gradients = nnx.grad(lambda module: module(ones).astype(jnp.float32).sum())(one)
    assert gradients.bias[...] == 4096
    assert gradients.kernel[...] == 4096
    ids = jnp.ones((1, 4096), jnp.int32)
    gradients = nnx.grad(lambda module: module(ids).astype(jnp.float32).sum())(table)
    np.testing.assert_array_equal(to_numpy(gradients.embedding[...]), [[0], [4096]])


def test_without_bias_there_is_none():
    module = fresh(lambda: linear.Linear(D, F, bias=False, rngs=nnx.Rngs(0)))
    tied = fresh(lambda: linear.OutputProjection(D, V, tied=True, bias=False, rngs=nnx.Rngs(0)))
    assert len(jax.tree.leaves(nnx.state(module))) == 1
    assert len(jax.tree.leaves(nnx.state(tied))) == 0
    x, table = jnp.asarray(normal(1, 3, D)), jnp.asarray(normal(V, D, seed=1))
    np.testing.assert_allclose(tied(x, table), x @ table.T, atol=1e-5)


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_kernel_kept_transposed_gives_the_same_outputs(length, bias, dtype):
    with jax.enable_x64(True):
        x = jnp.asarray(normal(B, length, D), dtype)
        module = fresh(lambda: linear.Linear(D, F, bias=bias, rngs=nnx.Rngs(0)), dtype)
        expected = to_numpy(module(x))
        linear.transpose_kernels(module)
        found = module(x)
        assert found.dtype == dtype
    # The sums are in another order: in bfloat16 one may round to the next number.
    ulp = 1e-14 if dtype == "float64" else 2.0**-7
    np.testing.assert_allclose(to_numpy(found), expected, rtol=ulp, atol=ulp / 100)
