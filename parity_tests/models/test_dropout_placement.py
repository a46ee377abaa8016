"""Dropout sits at the same places in both frameworks, each with a mask of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_transformer.config import ModelConfig
from jax_transformer.layers.block import EncoderLayer
from jax_transformer.layers.dropout import Dropout
from parity_tests.harness import QUICK, fresh, make_pair, to_numpy
from parity_tests.inputs import (
    SOURCE,
    SOURCE_MASK,
    TARGET,
    TARGET_MASK,
    B,
    D,
    F,
    N,
    S,
    V,
    normal,
)
from torch_reference.layers import block as reference

# Position encodings: 2. An encoder layer: weights, hidden units and two sublayers; a decoder
# layer has two attentions and three sublayers.
LAYERS = 2
PLACES = 2 + LAYERS * 4 + LAYERS * 6


def config(norm_placement):
    return ModelConfig(
        src_vocab_size=V,
        tgt_vocab_size=V,
        d_model=D,
        num_heads=N,
        d_ff=F,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        max_len=20,
        norm_placement=norm_placement,
    )


def field(shape):
    """A fixed factor for each element in place of a random mask: unlike zeros, all of it shows."""
    return 1 + 0.5 * np.sin(1.7 * np.arange(np.prod(shape))).reshape(shape)


INPUTS = (SOURCE, TARGET, SOURCE_MASK, TARGET_MASK)


@pytest.mark.parametrize("norm_placement", ["post", "pre"])
def test_the_same_masks_give_the_same_logits(norm_placement, monkeypatch):
    keys, calls = [], []

    def ours_dropped(self, x, key=None):
        if self.rate == 0:
            return x
        keys.append(jax.random.key_data(key))
        return x * jnp.asarray(field(x.shape), x.dtype)

    def theirs_dropped(self, x):
        if self.p == 0:
            return x
        calls.append(x.shape)
        return x * torch.from_numpy(field(tuple(x.shape)))

    monkeypatch.setattr(Dropout, "__call__", ours_dropped)
    monkeypatch.setattr(torch.nn.Dropout, "forward", theirs_dropped)
    with jax.enable_x64(True):
        theirs, ours = make_pair(config(norm_placement), jnp.float64)

        def run(*inputs):
            return ours(*inputs, dropout_key=jax.random.key(0)), keys

        found, used = jax.jit(run, compiler_options=QUICK)(*INPUTS)
    with torch.no_grad():
        expected = theirs.train()(*map(torch.from_numpy, INPUTS))
    np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=0, atol=1e-12)
    assert len(calls) == len(used) == PLACES
    distinct = {tuple(key.tolist()) for key in used}
    assert len(distinct) == PLACES, "two places of the model have one mask"


def test_without_a_key_and_in_evaluation_mode_nothing_is_dropped():
    x = normal(B, S, D)
    theirs = reference.EncoderLayer(D, N, F, 0.5).eval()
    with torch.no_grad():
        np.testing.assert_array_equal(*(theirs(torch.from_numpy(x))[0] for _ in range(2)))
    layers = [
        fresh(lambda rate=rate: EncoderLayer(D, N, F, rate, rngs=nnx.Rngs(0))) for rate in (0.5, 0)
    ]

    def run(key):
        return [layer(jnp.asarray(x), dropout_key=key)[0] for layer in layers]

    np.testing.assert_array_equal(*jax.jit(run, compiler_options=QUICK)(None))
    dropped, kept = jax.jit(run, compiler_options=QUICK)(jax.random.key(0))
    assert not np.allclose(dropped, kept)
