"""A model cast to bfloat16: what must stay in float32 does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer.models.parameters import cast_model, flatten, split
from jax_transformer.training.loss import cross_entropy
from parity_tests.harness import make_pair, rms, run_jax, run_torch, to_numpy
from parity_tests.inputs import LABELS
from parity_tests.models.test_encoder_decoder import CONFIG, MODEL_INPUTS, MODELS


@functools.cache
def narrow_outputs():
    _, model = make_pair(CONFIG)
    model = cast_model(model, jnp.bfloat16)
    inputs = [jnp.asarray(array) for array in list(MODEL_INPUTS.values())[:4]]
    enc_output = model.encode(inputs[0], inputs[2])
    logits = model(*inputs)
    weights = model.decoder.cross_attention(inputs[1], enc_output, *inputs[2:])
    return model, enc_output, logits, weights


def test_parameters_and_activations_are_in_bfloat16():
    model, enc_output, _, _ = narrow_outputs()
    _, params, buffers = split(model)
    for name, leaf in (flatten(params) | flatten(buffers)).items():
        assert leaf.dtype == jnp.bfloat16, name
    assert enc_output.dtype == jnp.bfloat16


def test_attention_weights_logits_and_loss_are_in_float32():
    _, _, logits, weights = narrow_outputs()
    assert all(layer.dtype == jnp.float32 for layer in weights)
    assert logits.dtype == jnp.float32
    loss = cross_entropy(logits.astype(jnp.bfloat16), jnp.asarray(LABELS), label_smoothing=0.1)
    assert loss.total.dtype == jnp.float32


def test_casting_leaves_the_model_itself_alone():
    _, model = make_pair(CONFIG)
    before = {name: np.array(leaf) for name, leaf in flatten(split(model)[1]).items()}
    cast_model(model, jnp.bfloat16)
    for name, leaf in flatten(split(model)[1]).items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, before[name])


@pytest.mark.parametrize("case", [MODELS[0], MODELS[5]], ids=str)
def test_the_whole_model_is_as_accurate_as_pytorch(case):
    # Errors of single tensors are chance after so many roundings: over all of them, relative
    # to their sizes, JAX's is at most 1.2 times PyTorch's.
    narrow = torch.bfloat16
    truth = run_torch(case, torch.float64, narrow)

    def error(found):
        relative = [
            rms(found[name] - exact) / rms(exact)
            for name, exact in truth.items()
            if not name.endswith("k_proj.bias")  # zero but for rounding
        ]
        return rms(np.array(relative))

    ours = error(run_jax(case, jnp.bfloat16, "quick", narrow))
    theirs = error(run_torch(case, narrow, narrow))
    assert ours <= 1.2 * theirs, f"{ours:.3g} against {theirs:.3g}"


def test_many_classes_in_bfloat16_lose_nothing_in_the_loss():
    # Left in bfloat16, a sum of 50,000 exponentials stalls.
    logits = np.random.default_rng(0).standard_normal((1, 1, 50_000))
    logits[0, 0, 7] = 8.0
    narrow = jnp.asarray(logits, jnp.bfloat16)
    labels = jnp.full((1, 1), 7, jnp.int32)
    loss = jax.jit(lambda logits: cross_entropy(logits, labels).total)(narrow)
    wide = to_numpy(narrow).astype(np.float64).ravel()
    exact = np.log(np.exp(wide).sum()) - wide[7]
    assert float(loss) == pytest.approx(exact, abs=1e-5)
