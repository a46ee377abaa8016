"""Attention: masked keys weigh exactly nothing, queries without keys give exactly nothing."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.config import RotaryConfig
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.errors import InputError
from jax_transformer.layers import attention
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.mask import create_causal_mask
from jax_transformer.models.parameters import split
from parity_tests.harness import (
    QUICK,
    Case,
    assert_as_accurate,
    assert_same_function,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    fresh,
    run_jax,
    run_torch,
    to_numpy,
    unchecked,
)
from parity_tests.inputs import (
    SOURCE_MASK,
    TARGET_MASK,
    TARGET_POSITIONS,
    B,
    D,
    N,
    S,
    T,
    normal,
    padding,
)
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


def grouped_case(name, heads, kv_heads, mask=None, bias=None, **options):
    return Case(
        name=name,
        jax=attention.dot_product_attention,
        torch=reference.dot_product_attention,
        inputs={
            "query": 2 * normal(B, T, heads, H),
            "key": 2 * normal(B, S, kv_heads, H, seed=1),
            "value": normal(B, S, kv_heads, H, seed=2),
            "mask": mask,
            "bias": bias,
        },
        options=options,
    )


def option_case(name, **options):
    """Self-attention of the module, at positions up to the end of a table."""
    bias = options.pop("bias", None)
    return Case(
        name=name,
        jax=attention.MultiHeadAttention,
        torch=reference.MultiHeadAttention,
        arguments=(D, N),
        options=options,
        inputs={
            "query": (x := normal(B, T, D)),
            "key": x,
            "value": x,
            "mask": TARGET_MASK,
            "bias": bias,
            "positions": TARGET_POSITIONS,
        },
        place="decoder.layers.0.self_attn",
    )


CASES = declare(
    function_case("function, no mask", S, None),
    function_case("function, padded and empty rows", S, SOURCE_MASK),
    function_case("function, causal", T, TARGET_MASK),
    module_case("module, no mask", S, None),
    module_case("module, padded and empty rows", S, SOURCE_MASK),
    module_case("module, causal", T, TARGET_MASK),
)


PER_HEAD = np.broadcast_to(SOURCE_MASK, (B, N, T, S)) & (normal(B, N, T, S) < 1)
ROTARY = {pairing: RotaryConfig(pairing=pairing, width=2) for pairing in ("adjacent", "half")}

OPTIONS = declare(
    grouped_case("grouped", 6, 2, SOURCE_MASK, normal(1, 6, T, S)),
    grouped_case("one key head", 4, 1, PER_HEAD, normal(B, 1, 1, S)),
    grouped_case("scale and soft cap", N, N, PER_HEAD, scale=1.0, soft_cap=3.0),
    option_case("grouped, wide heads, no biases", num_kv_heads=2, head_dim=6, qkv_bias=False),
    option_case("no bias of keys", key_bias=False),
    option_case("one key head, soft cap", num_kv_heads=1, soft_cap=2.0, out_bias=False),
    option_case("scale, bias", scale=1.0, bias=normal(1, N, T, T)),
    option_case("norms of heads, half pairs", query_key_norm="head", rotary=ROTARY["half"]),
    option_case(
        "norms of projections, adjacent pairs, grouped",
        query_key_norm="full",
        rotary=ROTARY["adjacent"],
        num_kv_heads=2,
        norm_epsilon=0.1,
    ),
    option_case(
        "norms from 1", query_key_norm="head", norm_unit_offset=True, norm_scale_in_float32=True
    ),
)

FUSED_OPTIONS = {"implementation": "fused", "need_weights": False}
FUSED = declare(
    grouped_case("fused", N, N, None, None, **FUSED_OPTIONS),
    grouped_case("fused, grouped, mask", 6, 2, SOURCE_MASK, None, **FUSED_OPTIONS),
    grouped_case("fused, one key head, bias", 4, 1, None, normal(B, 1, 1, S), **FUSED_OPTIONS),
    grouped_case(
        "fused, mask, bias, scale",
        N,
        N,
        PER_HEAD,
        normal(1, N, T, S),
        scale=1.0,
        **FUSED_OPTIONS,
    ),
)


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_with_every_option_both_frameworks_compute_the_same_function(case):
    check_float64(case, "quick")


@pytest.mark.parametrize("case", [OPTIONS[0], OPTIONS[2], OPTIONS[7]], ids=str)
def test_with_options_jax_is_as_accurate_as_pytorch(case):
    check_float32(case, "quick")


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_the_fused_form_computes_the_same_function_as_the_written_one(case):
    written = dataclasses.replace(case, options={**case.options, "implementation": "einsum"})
    assert_same_function(run_torch(case, torch.float64), run_torch(written, torch.float64))
    check_float32(case, "jit")
    # JAX's rounds the weights to bfloat16 as the written one does, PyTorch's has none.
    narrow, draws = torch.bfloat16, 8
    assert_as_accurate(
        run_jax(case, jnp.bfloat16, "quick", narrow, draws),
        run_torch(written, narrow, narrow, draws),
        run_torch(written, torch.float64, narrow, draws),
        factor=1.2,
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


def outputs_and_gradients(dtype, mask, **options):
    """Of both frameworks, for narrow dtypes too: (out, [weights], d query, d key, d value)."""
    arrays = [2 * normal(B, n, N, H, seed=n) for n in (T, S, S)]
    ours = [jnp.asarray(array, dtype) for array in arrays]
    theirs = [torch.from_numpy(a).to(getattr(torch, dtype)).requires_grad_() for a in arrays]

    def total(*tensors):
        out, weights = attention.dot_product_attention(*tensors, jnp.asarray(mask), **options)
        return out.astype(jnp.float32).sum(), [out] if weights is None else [out, weights]

    gradients, results = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*ours)
    out, weights = reference.dot_product_attention(*theirs, torch.from_numpy(mask), **options)
    out.float().sum().backward()
    yield [*results, *gradients]
    yield [out, *([] if weights is None else [weights]), *(tensor.grad for tensor in theirs)]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((dtype, {}) for dtype in ("float32", "bfloat16", "float16")),
        # XLA on CPUs has no fused float16.
        *((dtype, FUSED_OPTIONS) for dtype in ("float32", "bfloat16")),
    ],
)
def test_a_query_without_keys_gives_zeros_forwards_and_backwards(dtype, options):
    for framework in outputs_and_gradients(dtype, SOURCE_MASK, **options):
        for tensor in map(to_numpy, framework):
            assert np.isfinite(tensor).all()
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


@pytest.mark.parametrize("options", [{}, FUSED_OPTIONS], ids=["einsum", "fused"])
def test_a_query_without_keys_is_not_moved_by_a_bias(options):
    bias = normal(1, N, T, S)
    arrays = [normal(B, n, N, H, seed=n) for n in (T, S, S)] + [SOURCE_MASK, bias]
    out, _ = attention.dot_product_attention(*map(jnp.asarray, arrays), **options)
    theirs, _ = reference.dot_product_attention(*map(torch.from_numpy, arrays), **options)
    np.testing.assert_array_equal(out[3], 0.0)
    np.testing.assert_array_equal(theirs[3], 0.0)


def test_neighbouring_query_heads_share_a_key_head():
    # Values 0 and 1 of two key-value heads: not 0, 1, 0, 1.
    query = np.ones((1, 1, 4, 2), np.float32)
    value = np.zeros((1, 3, 2, 2), np.float32)
    value[:, :, 1] = 1.0
    for options in ({}, FUSED_OPTIONS):
        arrays = (query, value, value)
        out, _ = attention.dot_product_attention(*map(jnp.asarray, arrays), **options)
        theirs, _ = reference.dot_product_attention(*map(torch.from_numpy, arrays), **options)
        for heads in (to_numpy(out), to_numpy(theirs)):
            np.testing.assert_allclose(heads[0, 0, :, 0], [0, 0, 1, 1], atol=1e-7)


@pytest.mark.parametrize(("scale", "score"), [(None, 3.0), (1.0, 6.0), (0.25, 1.5)])
def test_the_scale_is_a_setting(scale, score):
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 2, 1, 4), np.float32)
    query[..., 0], key[0, 0, 0, 0] = 3.0, 2.0
    for framework, tensor in ((attention, jnp.asarray), (reference, torch.from_numpy)):
        arrays = map(tensor, (query, key, key))
        _, weights = framework.dot_product_attention(*arrays, scale=scale)
        np.testing.assert_allclose(to_numpy(weights)[..., 0], 1 / (1 + np.exp(-score)), rtol=1e-6)
        arrays = map(tensor, (query, key, key))
        _, capped = framework.dot_product_attention(*arrays, scale=scale, soft_cap=2.0)
        score_ = 2 * np.tanh(score / 2)
        np.testing.assert_allclose(to_numpy(capped)[..., 0], 1 / (1 + np.exp(-score_)), rtol=1e-6)


def test_the_head_width_need_not_divide_the_model_width():
    theirs = reference.MultiHeadAttention(20, 4, head_dim=8)
    module = fresh(lambda: attention.MultiHeadAttention(20, 4, head_dim=8, rngs=nnx.Rngs(0)))
    assert theirs.q_proj.weight.shape == (32, 20) == module.q_proj.kernel.shape[::-1]
    assert theirs.out_proj.weight.shape == (20, 32) == module.out_proj.kernel.shape[::-1]
    # The default scale is that of the head's width.
    query = normal(1, 1, 4, 8)
    for options in ({}, {"scale": 8**-0.5}):
        _, weights = attention.dot_product_attention(*map(jnp.asarray, (query,) * 3), **options)
        np.testing.assert_array_equal(weights, 1.0)


def temporary_bytes(kv_heads, groups, size, *, repeat=False, implementation="einsum"):
    """Of the compiled program of one query's attention and its gradients."""

    def run(query, key, value):
        if repeat:
            key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
        options = {"implementation": implementation, "need_weights": False}
        return attention.dot_product_attention(query, key, value, **options)[0].sum()

    shapes = [(1, 1, kv_heads * groups, 64), *[(1, size, kv_heads, 64)] * 2]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for function in (run, jax.grad(run, argnums=(0, 1, 2))):
        yield jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_one_token_of_one_row_is_the_same_head_by_head(kv_heads):
    with jax.enable_x64(True):
        query, key, value, bias = (
            jnp.asarray(normal(1, *shape, seed=seed), jnp.float64)
            for seed, shape in enumerate([(1, 6, 4), *[(9, kv_heads, 4)] * 2, (6, 1, 9)])
        )
        mask = jnp.arange(9)[None, None, None] < 7
        one, other = (
            attention.dot_product_attention(query, key, value, mask, bias, implementation=name)
            for name in ("einsum", "by head")
        )
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("implementation", ["einsum", "fused"])
def test_keys_and_values_are_never_repeated_in_memory(implementation):
    # From 1 to 16 query heads a key head, memory grows by rows of scores, not by copies of keys.
    size, groups = 2048, 16
    keys = 4 * size * 2 * 64
    one, many, repeated = (
        list(temporary_bytes(2, *arguments, implementation=implementation, **options))
        for arguments, options in (
            ((1, size), {}),
            ((groups, size), {}),
            ((groups, size), {"repeat": True}),
        )
    )
    scores = 4 * size * 2 * groups
    for few, grouped, copied in zip(one, many, repeated, strict=True):
        assert grouped - few <= 4 * scores < keys * groups / 4
        assert copied > keys * groups


@pytest.mark.parametrize("repeated", [{}, {"need_weights": True}, {"soft_cap": 2.0}, {"dtype": 64}])
def test_the_fused_form_is_taken_where_it_can_be_but_on_a_cpu(repeated):
    options = {"need_weights": False} | repeated
    with jax.enable_x64(True):
        dtype = jnp.float64 if options.pop("dtype", None) else jnp.float32
        arrays = [jnp.asarray(normal(1, 2, 1, 4), dtype)] * 3
        for backend in ("cpu", "gpu", "tpu"):
            with (
                mock.patch.object(jax, "default_backend", lambda backend=backend: backend),
                mock.patch.object(
                    attention, "fused_attention", wraps=attention.fused_attention
                ) as taken,
            ):
                attention.dot_product_attention(*arrays, **options)
            assert taken.called == (backend != "cpu" and not repeated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"need_weights": True}, "with need_weights=True"),
        ({"soft_cap": 2.0}, r"with soft_cap=2\.0"),
        ({"dropout": True}, "with dropout"),
    ],
)
def test_a_fused_form_that_cannot_be_is_refused(options, message):
    tensor = normal(1, 2, 1, 4)
    options = {**FUSED_OPTIONS, **options}
    ours, theirs = dict(options), dict(options)
    if options.pop("dropout", None):
        ours |= {"dropout": Dropout(0.5), "dropout_key": jax.random.key(0)}
        theirs["dropout"] = torch.nn.Dropout(0.5)
    with pytest.raises(InputError, match=message):
        attention.dot_product_attention(*[jnp.asarray(tensor)] * 3, **ours)
    with pytest.raises(InputError, match=message):
        reference.dot_product_attention(*[torch.from_numpy(tensor)] * 3, **theirs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(tensor, jnp.float64)] * 3
        with pytest.raises(InputError, match="with float64"):
            attention.dot_product_attention(*wide, **FUSED_OPTIONS)


def test_heads_that_do_not_divide_are_refused():
    query, key = normal(1, 2, 3, 4), normal(1, 2, 2, 4)
    with pytest.raises(InputError, match="3 query heads and 2 key-value heads"):
        attention.dot_product_attention(*map(jnp.asarray, (query, key, key)))
    with pytest.raises(InputError, match="3 query heads and 2 key-value heads"):
        reference.dot_product_attention(*map(torch.from_numpy, (query, key, key)))


MODERN = {
    "num_kv_heads": 2,
    "query_key_norm": "head",
    "rotary": RotaryConfig(pairing="half"),
    "qkv_bias": False,
}


def modern_module():
    return fresh(lambda: attention.MultiHeadAttention(D, N, **MODERN, rngs=nnx.Rngs(0)))


def run_modern(module, x, mask, places, cache=None):
    out, _ = module(x, x, x, mask, None, places, cache=cache)
    return out, cache


def compiled_modern():
    """As a function of arrays and a cache."""
    graphdef, params, _ = split(modern_module())
    run = jax.jit(
        lambda params, *inputs: run_modern(nnx.merge(graphdef, params), *inputs),
        compiler_options=QUICK,
    )
    return functools.partial(run, params)


def test_cached_is_uncached_at_every_position_and_cached_keys_stay_as_they_are():
    # Rows padded on neither side, on the right, on the left, and empty.
    run, x = compiled_modern(), jnp.asarray(normal(B, T, D))
    index = jnp.broadcast_to(jnp.arange(T), (B, T))
    mask = create_causal_mask(index, index, None, None, None, jnp.asarray(padding(T)))
    whole, _ = run(x, mask, TARGET_POSITIONS)
    for chunk in (1, 3, T):
        cache, first = KeyValueCache.empty(jnp.zeros((B, 1, 2, H)), T), None
        assert cache.key.shape == (B, 2, T, H)
        for start in range(0, T, chunk):
            part = slice(start, start + chunk)
            out, cache = run(x[:, part], mask[:, :, part], TARGET_POSITIONS[:, part], cache)
            np.testing.assert_allclose(out, whole[:, part], rtol=0, atol=2e-6)
            first = cache.key[:, :, 0] if first is None else first
            np.testing.assert_array_equal(cache.key[:, :, 0], first)


def test_documents_packed_into_a_row_attend_as_each_alone():
    run = compiled_modern()
    first, second = normal(1, 4, D), normal(1, 3, D, seed=1)

    def packed(first):
        segments = jnp.asarray([[1] * 4 + [2] * 3])
        index = jnp.arange(7)[None]
        mask = create_causal_mask(index, index, None, segments, segments)
        places = np.array([[0, 1, 2, 3, 0, 1, 2]])
        return run(np.concatenate([first, second], axis=1), mask, places)[0][:, 4:]

    index = jnp.arange(3)[None]
    alone, _ = run(second, create_causal_mask(index, index), index)
    np.testing.assert_allclose(packed(first), alone, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(packed(first), packed(first + 1))


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
