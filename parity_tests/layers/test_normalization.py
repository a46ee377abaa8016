"""Norms: the same function in both frameworks, epsilon and the order of roundings included."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.config import LayerConfig
from jax_transformer.layers import normalization
from jax_transformer.models.parameters import cast_model
from parity_tests.harness import (
    Case,
    check_bfloat16,
    check_float32,
    check_float64,
    declare,
    to_numpy,
)
from parity_tests.inputs import B, D, T, normal
from torch_reference.layers import normalization as reference


def rows() -> np.ndarray:
    """Common rows, and rows where epsilon decides: of variance 1e-5, 2.5e-7 and 0."""
    x = normal(B, T, D)
    x[0, 0] *= 1e-5**0.5
    x[0, 1] = np.tile([0.0, 1e-3], D // 2)
    x[0, 2] = 0.5
    x[0, 3] = 0.0
    x[1, 0] *= 1e4
    x[1, 1] += 100.0
    return x


CASES = declare(
    Case(
        name="layer norm",
        jax=normalization.LayerNorm,
        torch=reference.LayerNorm,
        arguments=(D,),
        inputs={"x": rows()},
        place="encoder.norm",
    ),
    Case(
        name="layer norm without bias",
        jax=normalization.LayerNorm,
        torch=reference.LayerNorm,
        arguments=(D, 1e-5, False),
        inputs={"x": rows()},
        place="norm",
    ),
    *(
        Case(
            name=f"RMS norm, epsilon {epsilon}, {'1 + weight' if unit_offset else 'weight'} "
            f"{'before' if before else 'after'} the cast",
            jax=normalization.RMSNorm,
            torch=reference.RMSNorm,
            arguments=(D, epsilon, unit_offset, before),
            inputs={"x": rows()},
            place="norm",
        )
        for epsilon, unit_offset, before in (
            (1e-8, False, False),
            (1e-6, False, True),
            (1e-6, True, False),
            (0.5, True, True),
        )
    ),
    *(
        Case(
            name=f"norm of a configuration: {options}",
            jax=normalization.make_norm,
            torch=reference.make_norm,
            arguments=(LayerConfig(d_model=8, num_heads=2, d_ff=8, causal=True, **options), D),
            inputs={"x": rows()},
            place="norm",
        )
        for options in (
            {"norm": "layer", "norm_epsilon": 0.5, "norm_bias": False},
            {
                "norm": "rms",
                "norm_epsilon": 0.5,
                "norm_unit_offset": True,
                "norm_scale_in_float32": True,
            },
        )
    ),
    Case(
        name="layer norm of another epsilon",
        jax=normalization.LayerNorm,
        torch=reference.LayerNorm,
        arguments=(D, 0.5),
        inputs={"x": rows()},
        place="encoder.norm",
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


@pytest.mark.parametrize(("epsilon", "top"), [(1e-5, 0.15617), (1e-6, 0.44721)])
def test_epsilon_is_added_to_the_variance(epsilon, top):
    x = np.tile([0.0, 1e-3], 4).astype(np.float32)[None]
    ours = normalization.LayerNorm(8, epsilon)(jnp.asarray(x))
    theirs = reference.LayerNorm(8, epsilon)(torch.from_numpy(x))
    # Five digits are given.
    assert to_numpy(ours).max() == pytest.approx(top, abs=5e-6)
    assert to_numpy(theirs).max() == pytest.approx(top, abs=5e-6)


def test_epsilon_is_that_of_pytorch_in_both_by_default():
    assert normalization.LayerNorm(8).epsilon == reference.LayerNorm(8).eps == 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_are_in_float32_whatever_the_dtype(dtype):
    # An outlier among ones: summed in bfloat16 the mean of 4096 ones stalls at 256.
    x = np.ones((1, 4096), np.float32)
    x[0, 0] = 300.0
    exact = (x.astype(np.float64) - x.mean(dtype=np.float64)) / np.sqrt(
        x.var(dtype=np.float64) + 1e-5
    )
    ours = cast_model(normalization.LayerNorm(4096), dtype)(jnp.asarray(x, dtype))
    theirs = reference.LayerNorm(4096).to(getattr(torch, dtype))(
        torch.from_numpy(x).to(getattr(torch, dtype))
    )
    assert ours.dtype == jnp.dtype(dtype)
    # Half an ulp of the output's own dtype is all that is lost.
    half_ulp = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(to_numpy(ours), exact, rtol=1.01 * half_ulp)
    np.testing.assert_allclose(to_numpy(theirs), exact, rtol=1.01 * half_ulp)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_rms_norm_adds_epsilon_to_the_mean_square(epsilon):
    x = np.array([[1.0, 3.0], [1e-3, 0.0], [0.0, 0.0]], np.float32)
    exact = x / np.sqrt(np.square(x.astype(np.float64)).mean(-1, keepdims=True) + epsilon)
    ours = normalization.RMSNorm(2, epsilon)(jnp.asarray(x))
    theirs = reference.RMSNorm(2, epsilon)(torch.from_numpy(x))
    np.testing.assert_allclose(ours, exact, rtol=3 * 2.0**-24)
    np.testing.assert_allclose(theirs.detach(), exact, rtol=3 * 2.0**-24)


def test_the_lecture_s_example():
    # [1, 3]: LayerNorm gives [-1, 1], RMSNorm [1, 3] / sqrt(5).
    x = np.array([[1.0, 3.0]], np.float32)
    for module, array in ((normalization, jnp.asarray(x)), (reference, torch.from_numpy(x))):
        np.testing.assert_allclose(to_numpy(module.LayerNorm(2, 1e-12)(array)), [[-1, 1]], 1e-6)
        np.testing.assert_allclose(
            to_numpy(module.RMSNorm(2)(array)), [[5**-0.5, 3 * 5**-0.5]], 1e-6
        )


def in_bfloat16(x: np.ndarray, weight: np.ndarray, **options: bool) -> list[np.ndarray]:
    """Of both frameworks: an RMSNorm with that weight, all in bfloat16."""
    ours = normalization.RMSNorm(len(weight), 1e-6, **options)
    ours.scale[...] = jnp.asarray(weight)
    theirs = reference.RMSNorm(len(weight), 1e-6, **options)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(weight))
    return [
        to_numpy(cast_model(ours, jnp.bfloat16)(jnp.asarray(x, jnp.bfloat16))),
        to_numpy(theirs.bfloat16()(torch.from_numpy(x).bfloat16())),
    ]


def bfloat16(x: np.ndarray) -> np.ndarray:
    return to_numpy(jnp.asarray(x, jnp.bfloat16))


def test_the_two_orders_of_cast_and_weight_are_those_of_llama_and_gemma_bit_for_bit():
    x, weight = normal(1, 256), 1 + 0.3 * normal(256, seed=1)
    narrow, factor = bfloat16(x), bfloat16(weight)
    normed = narrow / np.sqrt(np.square(narrow).mean(-1, keepdims=True) + np.float32(1e-6))
    llama, gemma = bfloat16(bfloat16(normed) * factor), bfloat16(normed * factor)
    assert 0.1 < np.mean(llama != gemma) < 0.5
    for found in in_bfloat16(x, weight):
        np.testing.assert_array_equal(found, llama)
    for found in in_bfloat16(x, weight, scale_in_float32=True):
        np.testing.assert_array_equal(found, gemma)


@pytest.mark.parametrize("scale_in_float32", [False, True])
def test_one_is_added_to_the_weight_in_float32(scale_in_float32):
    # 16.8125 is between two numbers of bfloat16: added there, the sum would be 16.75.
    x = np.full((1, 4), 3.0, np.float32)
    options = {"unit_offset": True, "scale_in_float32": scale_in_float32}
    for found in in_bfloat16(x, np.full(4, 15.8125, np.float32), **options):
        np.testing.assert_array_equal(found, bfloat16(np.full((1, 4), 16.8125)))
    # Where the output could tell: of 1/2 and 1 the second is off by the first's rounding.
    x = np.array([[1.0, 1.0, 1.0, 1.7]], np.float32)
    normed = bfloat16(x) / np.sqrt(np.square(bfloat16(x)).mean() + 1e-6)
    normed = normed if scale_in_float32 else bfloat16(normed)
    for found in in_bfloat16(x, np.full(4, 15.8125, np.float32), **options):
        np.testing.assert_array_equal(found, bfloat16(normed * np.float32(16.8125)))
        assert (found != bfloat16(normed * np.float32(16.75))).any()


def test_the_mean_square_is_summed_in_float32():
    # In bfloat16 adding 1 to 90000 changes nothing.
    x = np.ones((1, 4096), np.float32)
    x[0, 0] = 300.0
    for found in in_bfloat16(x, np.ones(4096, np.float32)):
        # 1 / 4.79295, rounded once.
        assert found[0, 1] == bfloat16(np.float32(1 / 4.79295))


def test_a_weight_that_is_added_to_one_starts_at_zero():
    assert (normalization.RMSNorm(4, unit_offset=True).scale[...] == 0).all()
    assert (reference.RMSNorm(4, unit_offset=True).weight == 0).all()
    assert (normalization.RMSNorm(4).scale[...] == 1).all()
    assert (reference.RMSNorm(4).weight == 1).all()
