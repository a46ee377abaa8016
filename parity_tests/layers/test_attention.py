"""Attention: masked keys weigh exactly nothing, queries without keys give exactly nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.errors import InputError
from jax_transformer.layers import attention
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    run_torch,
    to_numpy,
    unchecked,
)
from parity_tests.inputs import SOURCE_MASK, TARGET_MASK, B, D, N, S, T, normal
from torch_reference.layers import attention as reference

H = D // N


def function_case(name, keys, mask):
    return Case(
        name=name,
        jax=attention.dot_product_attention,
        torch=reference.dot_product_attention,
        inputs={
            # Scores of order 1 to 10.
            "query": 2 * normal(B, T, N, H),
            "key": 2 * normal(B, keys, N, H, seed=1),
            "value": normal(B, keys, N, H, seed=2),
            "mask": mask,
        },
    )


def module_case(name, keys, mask):
    return Case(
        name=name,
        jax=attention.MultiHeadAttention,
        torch=reference.MultiHeadAttention,
        arguments=(D, N),
        inputs={
            "query": normal(B, T, D),
            "key": normal(B, keys, D, seed=1),
            "value": normal(B, keys, D, seed=2),
            "mask": mask,
        },
        place="decoder.layers.0.cross_attn",
    )


CASES = declare(
    function_case("function, no mask", S, None),
    function_case("function, padded and empty rows", S, SOURCE_MASK),
    function_case("function, causal", T, TARGET_MASK),
    module_case("module, no mask", S, None),
    module_case("module, padded and empty rows", S, SOURCE_MASK),
    module_case("module, causal", T, TARGET_MASK),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "jit")


@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=str)
def test_op_by_op_the_same_holds(case):
    check_float64(case, "op by op")
    check_float32(case, "op by op")


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_in_bfloat16_jax_is_as_accurate_as_pytorch(case):
    check_bfloat16(case, "quick")


def test_the_inputs_give_scores_of_order_1_to_10():
    for case in CASES[:3]:
        query, key = case.inputs["query"], case.inputs["key"]
        scores = np.einsum("btnh,bsnh->bnts", query, key) * H**-0.5
        assert 1 < scores.std() < 10


def test_a_key_bias_has_no_gradient_but_rounding():
    # Why the harness measures it on the scale of its kernel's.
    gradients = run_torch(CASES[4], torch.float64)
    of_bias, of_kernel = (
        np.abs(gradients[f"gradient of k_proj.{name}"]).max() for name in ("bias", "weight")
    )
    assert of_bias < 1e-14 * of_kernel


def test_scores_are_divided_by_the_root_of_the_head_width():
    # One number a and b in heads of width 4: the scores are ab/2 and 0.
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 2, 1, 4), np.float32)
    query[..., 0], key[0, 0, 0, 0] = 3.0, 2.0
    expected = [1 / (1 + np.exp(-3.0)), 1 / (1 + np.exp(3.0))]
    _, weights = attention.dot_product_attention(*map(jnp.asarray, (query, key, key)))
    _, their_weights = reference.dot_product_attention(*map(torch.from_numpy, (query, key, key)))
    np.testing.assert_allclose(weights.ravel(), expected, rtol=1e-6)
    np.testing.assert_allclose(their_weights.ravel(), expected, rtol=1e-6)


def test_later_queries_of_a_chunk_see_more_keys():
    # Two queries that follow three cached keys: the mask is aligned at the bottom right.
    mask = np.array([[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]], bool)
    query, key = np.zeros((1, 2, 1, 1), np.float32), np.zeros((1, 5, 1, 1), np.float32)
    value = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
    out, _ = attention.dot_product_attention(*map(jnp.asarray, (query, key, value, mask)))
    theirs, _ = reference.dot_product_attention(*map(torch.from_numpy, (query, key, value, mask)))
    np.testing.assert_allclose(out.ravel(), [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(theirs.ravel(), [1.5, 2.0], rtol=1e-6)


def outputs_and_gradients(dtype, mask):
    """Of both frameworks, for narrow dtypes too: (out, weights, d query, d key, d value)."""
    arrays = [2 * normal(B, n, N, H, seed=n) for n in (T, S, S)]
    ours = [jnp.asarray(array, dtype) for array in arrays]
    theirs = [torch.from_numpy(a).to(getattr(torch, dtype)).requires_grad_() for a in arrays]

    def total(*tensors):
        out, weights = attention.dot_product_attention(*tensors, jnp.asarray(mask))
        return out.astype(jnp.float32).sum(), (out, weights)

    gradients, results = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*ours)
    out, weights = reference.dot_product_attention(*theirs, torch.from_numpy(mask))
    out.float().sum().backward()
    yield [*results, *gradients]
    yield [out, weights, *(tensor.grad for tensor in theirs)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_query_without_keys_gives_zeros_forwards_and_backwards(dtype):
    for framework in outputs_and_gradients(dtype, SOURCE_MASK):
        out, weights, *gradients = (to_numpy(tensor) for tensor in framework)
        assert all(np.isfinite(tensor).all() for tensor in (out, weights, *gradients))
        for tensor in (out, weights, *gradients):
            np.testing.assert_array_equal(tensor[3], 0.0)
            assert np.abs(tensor[:3]).max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_masked_key_has_probability_and_gradient_exactly_zero(dtype):
    for framework in outputs_and_gradients(dtype, SOURCE_MASK):
        _, weights, _, d_key, d_value = (to_numpy(tensor) for tensor in framework)
        hidden = ~SOURCE_MASK[:, 0, 0, :]
        np.testing.assert_array_equal(weights.transpose(0, 3, 1, 2)[hidden], 0.0)
        np.testing.assert_array_equal(d_key[hidden], 0.0)
        np.testing.assert_array_equal(d_value[hidden], 0.0)
        # The real keys share one: float32 weights whatever the dtype.
        np.testing.assert_allclose(weights[:3].sum(-1), 1.0, rtol=1e-6)


def test_softmax_is_in_float32_for_narrow_dtypes():
    for dtype in ("bfloat16", "float16"):
        for _, weights, *_ in outputs_and_gradients(dtype, SOURCE_MASK):
            assert str(weights.dtype).removeprefix("torch.") == "float32"


def test_scores_in_the_thousands_stay_finite():
    for dtype in (jnp.float32, jnp.bfloat16):
        query = jnp.full((1, 1, 1, 4), 200.0, dtype)
        key = jnp.asarray([200.0, 199.0, -200.0], dtype)[None, :, None, None] * jnp.ones(4, dtype)
        mask = jnp.asarray([True, True, False])[None, None, None]
        out, weights = attention.dot_product_attention(query, key, key, mask)
        assert jnp.isfinite(out).all()
        np.testing.assert_array_equal(weights.ravel(), [1.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_mask_of_numbers_is_refused(dtype):
    # As users run it: without the checks of the test suite.
    tensor = normal(1, 2, 1, 4)
    with unchecked():
        with pytest.raises(InputError, match="must be boolean"):
            attention.dot_product_attention(
                *[jnp.asarray(tensor)] * 3, jnp.ones((1, 1, 2, 2), dtype)
            )
        with pytest.raises(InputError, match="must be boolean"):
            reference.dot_product_attention(
                *[torch.from_numpy(tensor)] * 3, torch.ones(1, 1, 2, 2).to(getattr(torch, dtype))
            )


def test_keys_and_values_may_be_left_out_only_where_a_cache_holds_them():
    module = fresh(lambda: attention.MultiHeadAttention(D, N, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="only where a cache"):
        module(jnp.zeros((1, 1, D)), None, None)
