"""A user's own pair of modules."""

import subprocess
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.errors import InputError
from jax_transformer.porting import Rule
from jax_transformer.porting.operations import Transpose
from jax_transformer.verification import assert_same_function, compare_modules

WIDTH = 6


class TheirLayer(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.ln = torch.nn.LayerNorm(WIDTH)
        self.fc = torch.nn.Linear(WIDTH, WIDTH)
        self.slope = slope

    def forward(self, x):
        return x + torch.nn.functional.leaky_relu(self.fc(self.ln(x)), self.slope)


class TheirNet(torch.nn.Module):
    def __init__(self, slope=0.01):
        super().__init__()
        torch.manual_seed(0)
        self.h = torch.nn.ModuleList([TheirLayer(slope) for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return self.head(x)


class OurLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jax.nn.leaky_relu(self.linear(self.norm(x)), 0.01)


class OurNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([OurLayer(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


MAPPING = (
    Rule("h.{i}.ln.weight", "blocks.{i}.norm.scale"),
    Rule("h.{i}.ln.bias", "blocks.{i}.norm.bias"),
    Rule("h.{i}.fc.weight", "blocks.{i}.linear.kernel", (Transpose(),)),
    Rule("h.{i}.fc.bias", "blocks.{i}.linear.bias"),
    Rule("head.weight", "out.kernel", (Transpose(),)),
)
INPUTS = (np.random.default_rng(0).standard_normal((2, 5, WIDTH)).astype(np.float32),)


def ours():
    return nnx.eval_shape(lambda: OurNet(nnx.Rngs(0)))


def test_a_pair_that_is_the_same_passes():
    report = compare_modules(TheirNet(), ours(), MAPPING, INPUTS, backward=True)
    assert report.same
    assert {"blocks.0.norm:out", "blocks.1.linear:out", "blocks.0:out", "out:out"} <= set(
        report.errors
    )
    assert set(report.gradients) >= {"blocks.0.norm:out", "out:in"}
    assert_same_function(TheirNet(), ours(), MAPPING, INPUTS)


def test_the_failure_message_names_the_module():
    with pytest.raises(AssertionError, match=r"`blocks\.0`: differs from an unknown cause"):
        assert_same_function(TheirNet(slope=0.02), ours(), MAPPING, INPUTS)


def test_a_weight_carried_by_a_wrong_rule_is_found_in_its_module():
    wrong = [rule for rule in MAPPING if rule.target != "blocks.{i}.linear.kernel"]
    wrong.append(Rule("h.{i}.fc.weight", "blocks.{i}.linear.kernel"))
    with pytest.raises(AssertionError, match=r"`blocks\.0\.linear`.*\n`blocks\.1\.linear`"):
        assert_same_function(TheirNet(), ours(), tuple(wrong), INPUTS)


def test_both_modules_are_left_as_they_are():
    theirs, model = TheirNet(), OurNet(nnx.Rngs(0))
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    kernel = model.out.kernel[...]
    compare_modules(theirs, model, MAPPING, INPUTS)
    assert all(torch.equal(before[name], t) for name, t in theirs.state_dict().items())
    assert theirs.training
    assert jnp.array_equal(model.out.kernel[...], kernel)


def test_what_the_rules_do_not_fit_is_one_line():
    with pytest.raises(InputError, match=r"head\.weight .* has no place") as error:
        compare_modules(TheirNet(), ours(), MAPPING[:-1], INPUTS)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"jax_callable is a int: give an nnx\.Module, or a"):
        compare_modules(TheirNet(), cast(Any, 3), MAPPING, INPUTS)


def test_it_imports_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['torch_reference'] = None\n"
        "from jax_transformer.verification import assert_same_function, compare_modules, verify\n"
        "import jax_transformer.verification.command, jax_transformer.verification.reference\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
