"""A function of parameters against a PyTorch module: points in place of modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jax_transformer.errors import InputError
from jax_transformer.porting import Rule
from jax_transformer.porting.operations import Transpose
from jax_transformer.verification import assert_same_function, compare_modules, point
from parity_tests.verification.test_face import INPUTS, MAPPING, WIDTH, TheirNet


def norm(parameters, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * parameters["scale"] + parameters["bias"]


def layer(parameters, x, slope):
    normed = point("norm", norm(parameters["norm"], x))
    return x + jax.nn.leaky_relu(
        normed @ parameters["linear"]["kernel"] + parameters["linear"]["bias"], slope
    )


@functools.partial(jax.jit, static_argnames="slopes")
def net(parameters, x, slopes=(0.01, 0.01)):
    for index, slope in enumerate(slopes):
        block = parameters["blocks"][str(index)]
        normed = point(f"blocks.{index}.norm", norm(block["norm"], x))
        linear = normed @ block["linear"]["kernel"] + block["linear"]["bias"]
        x = point(f"blocks.{index}", x + jax.nn.leaky_relu(linear, slope))
    return x @ parameters["out"]["kernel"]


def test_a_function_that_is_the_same_passes_compiled_parts_and_all():
    report = compare_modules(TheirNet(), net, MAPPING, INPUTS, backward=True)
    assert report.same
    points = {"blocks.0.norm:out", "blocks.0:out", "blocks.1.norm:out", "blocks.1:out", ":out"}
    assert set(report.errors) == points
    assert set(report.gradients) == points - {":out"}
    assert report.accuracy["blocks.1:out"].theirs > 0


def test_the_first_point_that_differs_given_the_reference_s_values_is_named():
    wrong = functools.partial(net, slopes=(0.01, 0.02))
    report = compare_modules(TheirNet(), wrong, MAPPING, INPUTS)
    assert [each.module for each in report.diagnoses] == ["blocks.1"]
    with pytest.raises(AssertionError, match=r"`blocks\.1`: differs from an unknown cause"):
        assert_same_function(TheirNet(), wrong, MAPPING, INPUTS)
    # What follows a fault is computed from the reference's value.
    both = compare_modules(TheirNet(), functools.partial(net, slopes=(0.02, 0.01)), MAPPING, INPUTS)
    assert both.errors["blocks.1:out"] < 1e-12
    assert both.output_error > 1e-4


def test_without_points_the_output_is_what_is_compared():
    def plain(parameters, x):
        return net(parameters, x) * (1 + 1e-9)

    quiet = compare_modules(
        TheirNet(), lambda parameters, x: net(parameters, x) + 0, (*MAPPING,), INPUTS, dtype=None
    )
    assert quiet.same
    report = compare_modules(TheirNet(), plain, MAPPING, INPUTS, dtype=None)
    assert not report.same
    assert report.output_error == pytest.approx(1e-9, rel=1e-3)


def test_parameters_may_be_any_tree():
    tree = jax.eval_shape(
        lambda: [
            {
                "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.ones(WIDTH)},
                "linear": {"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)},
            }
            for _ in range(2)
        ]
    )
    out = jax.ShapeDtypeStruct((WIDTH, 3), jnp.float32)

    def of_lists(parameters, x):
        blocks, out = parameters
        return net(
            {
                "blocks": {str(index): block for index, block in enumerate(blocks)},
                "out": {"kernel": out},
            },
            x,
        )

    mapping = tuple(
        Rule(
            rule.source,
            rule.target.replace("blocks.", "0.").replace("out.kernel", "1"),
            rule.operations,
        )
        for rule in MAPPING
    )
    modules = {"h.0": "blocks.0", "h.1": "blocks.1"}
    report = compare_modules(
        TheirNet(), of_lists, mapping, INPUTS, parameters=(tree, out), modules=modules
    )
    assert report.same
    assert {"blocks.0:out", "blocks.1:out"} <= set(report.errors)


class LinenLayer(linen.Module):
    slope: float = 0.01

    @linen.compact
    def __call__(self, x):
        normed = linen.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)
        return x + jax.nn.leaky_relu(linen.Dense(WIDTH)(normed), self.slope)


class LinenNet(linen.Module):
    slopes: tuple = (0.01, 0.01)

    @linen.compact
    def __call__(self, x):
        for index, slope in enumerate(self.slopes):
            x = LinenLayer(slope, name=f"block_{index}")(x)
        return linen.Dense(3, use_bias=False, name="out")(x)


LINEN = (
    Rule("h.{i}.ln.weight", "block_{i}.LayerNorm_0.scale"),
    Rule("h.{i}.ln.bias", "block_{i}.LayerNorm_0.bias"),
    Rule("h.{i}.fc.weight", "block_{i}.Dense_0.kernel", (Transpose(),)),
    Rule("h.{i}.fc.bias", "block_{i}.Dense_0.bias"),
    Rule("head.weight", "out.kernel", (Transpose(),)),
)


def test_modules_of_linen_are_points_by_themselves():
    options = {"modules": {"h.0": "block_0", "h.1": "block_1"}}

    def of(net):
        return lambda parameters, x: net.apply({"params": parameters}, x)

    report = compare_modules(TheirNet(), of(LinenNet()), LINEN, INPUTS, **options)
    assert report.same
    assert {"block_0.LayerNorm_0:out", "block_1.Dense_0:out", "block_1:out", "out:out"} <= set(
        report.errors
    )
    with pytest.raises(AssertionError, match=r"`block_1`: differs"):
        assert_same_function(
            TheirNet(), of(LinenNet((0.01, 0.02))), LINEN, INPUTS, dtype=None, **options
        )


def test_a_point_is_the_identity_elsewhere():
    x = jnp.arange(3.0)
    assert point("anything", x) is x
    np.testing.assert_array_equal(jax.jit(lambda x: point("anything", x) * 2)(x), x * 2)


def test_two_parameters_of_one_name_are_refused():
    tree = {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)}
    with pytest.raises(InputError, match=r"two parameters are called a\.b"):
        compare_modules(TheirNet(), net, MAPPING, INPUTS, parameters=tree)
