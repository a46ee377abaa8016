"""Clipping, Adam and AdamW, against PyTorch's and against hand-computed numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer.config import ModelConfig
from jax_transformer.layers.stack import stack_layers, unstack_layers
from jax_transformer.models.parameters import flatten
from jax_transformer.training.optimizer import adam, clip_by_global_norm, matrices
from jax_transformer.training.run import abstract_model


def clip_both(gradients, max_norm):
    updates, state = clip_by_global_norm(max_norm).update(
        {"a": jnp.asarray(gradients)}, clip_by_global_norm(max_norm).init({})
    )
    parameter = torch.nn.Parameter(torch.zeros(len(gradients), dtype=torch.float64))
    parameter.grad = torch.tensor(gradients, dtype=torch.float64)
    norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    return updates["a"], state.gradient_norm, parameter.grad.numpy(), float(norm)


@pytest.mark.parametrize("max_norm", [1.0, 0.01, 5.0, 100.0])
def test_clipping_is_that_of_pytorch(max_norm):
    with jax.enable_x64(True):
        clipped, norm, expected, expected_norm = clip_both([3.0, 4.0], max_norm)
    np.testing.assert_allclose(clipped, expected, rtol=1e-15)
    assert float(norm) == expected_norm == 5.0


def test_clipping_divides_by_the_norm_and_an_epsilon():
    with jax.enable_x64(True):
        clipped, *_ = clip_both([3.0, 4.0], 1.0)
    np.testing.assert_allclose(clipped, [0.59999988, 0.79999984], rtol=1e-8)


def test_the_norm_is_that_of_all_leaves_together():
    gradients = {"a": jnp.array([3.0]), "b": {"c": jnp.array([[0.0], [4.0]])}}
    clipped, state = clip_by_global_norm(1.0).update(gradients, clip_by_global_norm(1.0).init({}))
    assert float(state.gradient_norm) == 5.0
    np.testing.assert_allclose(clipped["a"], [0.6], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"]["c"], [[0.0], [0.8]], rtol=1e-6)


def one_update(gradient, **options):
    optimizer = adam(optax.constant_schedule(1.0), max_norm=float("inf"), **options)
    params = {"a": jnp.float32(0.0)}
    updates, _ = optimizer.update({"a": jnp.float32(gradient)}, optimizer.init(params), params)
    return float(updates["a"])


def test_epsilon_is_outside_the_root_and_after_the_bias_correction():
    # 0.0307 if added before the correction, 1e-4 if inside the root.
    assert one_update(1e-8, b2=0.999, eps=1e-8) == pytest.approx(-0.5, rel=1e-5)


def test_zero_gradients_move_nothing():
    assert one_update(0.0) == 0.0


def test_moments_and_updates_are_those_of_pytorch():
    generator = np.random.default_rng(0)
    gradients = generator.standard_normal((20, 7))
    gradients[5] = 0.0
    parameter = torch.nn.Parameter(torch.tensor(generator.standard_normal(7)))
    theirs = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    with jax.enable_x64(True):
        ours = adam(optax.constant_schedule(0.01), max_norm=1.0)
        params = {"a": jnp.asarray(parameter.detach().numpy())}
        state = ours.init(params)
        for gradient in gradients:
            updates, state = ours.update({"a": jnp.asarray(gradient)}, state, params)
            params = optax.apply_updates(params, updates)
            parameter.grad = torch.tensor(gradient)
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            theirs.step()
        expected = theirs.state[parameter]
        moments = {name: optax.tree_utils.tree_get(state, name)["a"] for name in ("mu", "nu")}
        np.testing.assert_allclose(params["a"], parameter.detach().numpy(), rtol=1e-12)
        np.testing.assert_allclose(moments["mu"], expected["exp_avg"].numpy(), rtol=1e-12)
        np.testing.assert_allclose(moments["nu"], expected["exp_avg_sq"].numpy(), rtol=1e-12)


def draw(like, generator, scale=1.0):
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * generator.standard_normal(leaf.shape)), like
    )


@pytest.fixture(scope="module")
def shapes():
    """The parameters of a model of two layers a side, as shapes."""
    config = ModelConfig(
        src_vocab_size=5, tgt_vocab_size=5, d_model=4, num_heads=2, d_ff=6, max_len=8,
        num_encoder_layers=2, num_decoder_layers=2, norm_placement="pre",
        position_encoding="learned",
    )  # fmt: skip
    return abstract_model(config)[1]


def test_decay_falls_on_kernels_and_tables_alone_stacked_or_listed(shapes):
    chosen = flatten(matrices(shapes))
    assert {name.rpartition(".")[2] for name, decays in chosen.items() if decays} == {
        "kernel", "embedding",
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name, decays in chosen.items() if not decays} == {
        "bias", "scale",
    }  # fmt: skip
    stacked = jax.eval_shape(stack_layers, shapes)
    assert any(leaf.ndim == 2 for name, leaf in flatten(stacked).items() if "norm1.scale" in name)
    of_stacked = flatten(matrices(stacked))
    for name, decays in chosen.items():
        assert of_stacked[re.sub(r"layers\.\d+\.", "layers.", name)] == decays, name


@pytest.mark.parametrize("layout", ["listed", "stacked"])
def test_one_update_of_zero_gradients_shrinks_matrices_and_leaves_all_else(shapes, layout):
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = draw(shapes, generator)
        if layout == "stacked":
            params = stack_layers(params)
        ours = adam(optax.constant_schedule(0.25), weight_decay=0.5)
        gradients = jax.tree.map(jnp.zeros_like, params)
        updates, _ = ours.update(gradients, ours.init(params), params)
        after, before = optax.apply_updates(params, updates), params
        if layout == "stacked":
            after, before = (unstack_layers(tree, shapes) for tree in (after, before))
        decays, before = flatten(matrices(shapes)), flatten(before)
        for name, leaf in flatten(after).items():
            expected = before[name] * (1 - 0.25 * 0.5) if decays[name] else before[name]
            np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("layout", ["listed", "stacked"])
def test_fifty_updates_are_those_of_pytorchs_adamw(shapes, layout):
    generator = np.random.default_rng(1)
    with jax.enable_x64(True):
        params = draw(shapes, generator)
        gradients = [draw(shapes, generator) for _ in range(50)]
        decays = flatten(matrices(shapes))
        tensors = {
            name: torch.nn.Parameter(torch.tensor(np.asarray(leaf)))
            for name, leaf in flatten(params).items()
        }
        groups = [
            {"params": [leaf for name, leaf in tensors.items() if decays[name]]},
            {"params": [leaf for name, leaf in tensors.items() if not decays[name]],
             "weight_decay": 0.0},
        ]  # fmt: skip
        theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        ours = adam(optax.constant_schedule(0.01), b2=0.99, eps=1e-8, weight_decay=0.1)
        update = jax.jit(ours.update)
        lay = stack_layers if layout == "stacked" else lambda tree: tree
        params = lay(params)
        state = ours.init(params)
        for gradient in gradients:
            updates, state = update(lay(gradient), state, params)
            params = optax.apply_updates(params, updates)
            for name, leaf in flatten(gradient).items():
                tensors[name].grad = torch.tensor(np.asarray(leaf))
            torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
            theirs.step()
        params = unstack_layers(params, shapes) if layout == "stacked" else params
        for name, leaf in flatten(params).items():
            np.testing.assert_allclose(leaf, tensors[name].detach().numpy(), rtol=1e-9, atol=1e-13)
