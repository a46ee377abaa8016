"""Points: in order, and under the same names on both sides."""

import jax.numpy as jnp
import pytest

from jax_transformer.layers.normalization import LayerNorm
from jax_transformer.verification.capture import (
    Names,
    intercepted,
    module_of,
    parent_of,
    torch_record,
)
from jax_transformer.verification.pairs import as_torch, own_points
from parity_tests.planted_faults.models import correct


def torch_points(pair):
    import torch

    inputs = [as_torch(each, torch.float32) for each in pair.inputs]
    _, record = torch_record(
        pair.theirs, lambda: pair.theirs(*inputs), lambda name: name, backward=False
    )
    return record.points


@pytest.mark.parametrize("model", ["llama", "document"])
def test_both_sides_have_the_same_points_in_the_same_order(model):
    pair = correct(model)
    ours, _ = own_points(pair, "float32")
    theirs = torch_points(pair)
    # PyTorch's Dropout and lists of layers are modules on one side alone.
    common = [point for point in ours if point in theirs]
    assert common == [point for point in theirs if point in ours]
    assert len(common) > 40
    assert all(ours[point].shape == theirs[point].shape for point in common)


def test_each_point_comes_after_what_it_is_computed_from():
    ours, _ = own_points(correct("llama"), "float32")
    order = list(ours)
    chain = ["layers.0:in", "layers.0.norm1:in", "layers.0.norm1:out", "layers.0.self_attn:in"]
    chain += ["layers.0.self_attn.out_proj:out", "layers.0.self_attn:out", "layers.0:out"]
    assert [point for point in order if point in chain] == chain


def test_a_second_call_has_a_number():
    names = Names()
    assert [names.next("a"), names.next("b"), names.next("a")] == ["a", "b", "a#2"]
    assert Names(3).next("a") == "a#3"
    assert module_of("layers.0.norm1#2:out") == "layers.0.norm1"
    assert parent_of("layers.0.norm1") == "layers.0"
    assert parent_of("norm") == ""


def test_calls_are_as_before_afterwards():
    pair = correct("gpt2")
    before = LayerNorm.__call__
    with pytest.raises(ZeroDivisionError), intercepted(pair.ours, lambda *args: 1 / 0):
        pair.ours(*map(jnp.asarray, pair.inputs))
    assert LayerNorm.__call__ is before
    assert not any(module._forward_hooks for module in pair.theirs.modules())
    assert jnp.zeros(1).dtype == jnp.float32
