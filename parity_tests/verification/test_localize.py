"""The first module that differs is named, forwards and backwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.models.parameters import cast_model
from jax_transformer.verification.capture import module_of
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.localize import compare_forward, culprit, with_input
from jax_transformer.verification.pairs import as_jax, reference_run
from parity_tests.harness import unchecked
from parity_tests.planted_faults import plant
from parity_tests.planted_faults.models import correct


def compare(pair):
    with unchecked(), jax.enable_x64(True):
        _, record = reference_run(pair, backward=False)
        inputs = [as_jax(each, jnp.float64) for each in pair.inputs]
        model = cast_model(pair.ours, jnp.float64)
        return compare_forward(model, lambda model: model(*inputs), record, pair.valid)[1]


@pytest.mark.parametrize("place", ["layers.0.norm1", "layers.1.ffn.up_proj", "norm"])
def test_only_the_module_with_the_fault_differs_when_each_is_fed_the_reference(place):
    comparison = compare(plant.output(place, lambda x: 1.01 * x)(correct("llama")))
    assert comparison.first_fault() == f"{place}:out"
    assert [p for p, e in comparison.errors.items() if e > SAME_FUNCTION] == [f"{place}:out"]


def test_without_a_fault_nothing_differs():
    comparison = compare(correct("llama"))
    assert comparison.first_fault() is None
    assert comparison.only_theirs == ()


def test_two_unrelated_models_differ_at_every_module_with_parameters():
    pair = dataclasses.replace(correct("llama"), theirs=correct("llama", seed=1).theirs)
    errors = compare(pair).errors
    assert len({module_of(p) for p in errors}) > 20
    last = ("proj", "norm", "norm1", "norm2", "embedding")
    own = [p for p in errors if p.endswith(":out") and module_of(p).endswith(last)]
    assert len(own) == 3 + 2 * 9
    assert all(errors[p] > 0.1 for p in own)


def test_the_culprit_of_an_input_is_the_module_around():
    assert culprit("layers.0.norm1:out") == "layers.0.norm1"
    assert culprit("layers.0.norm1:in") == "layers.0"
    assert culprit("embedding:out") == "embedding"


def test_an_input_is_replaced_wherever_it_is_given():
    x, mask = np.zeros(2), np.ones(2)
    changed = with_input((x, x, x, mask), lambda value: value + 1)
    assert changed[0] is changed[1] is changed[2]
    assert changed[3] is mask
    assert with_input((), lambda value: 1 / 0) == ()
