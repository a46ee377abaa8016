"""Fresh parameters: Xavier-uniform matrices, PyTorch's biases, the same law in both frameworks."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jax_transformer.config import ModelConfig
from jax_transformer.layers.linear import Linear
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split
from parity_tests.harness import QUICK, carry_back, parameters_of, to_numpy
from torch_reference.models.encoder_decoder import Transformer as ReferenceTransformer

CONFIG = ModelConfig(
    src_vocab_size=600,
    tgt_vocab_size=700,
    d_model=512,
    num_heads=8,
    d_ff=768,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_len=520,
    position_encoding="learned",
)


@functools.cache
def initialized():
    """Parameters of the two frameworks under PyTorch's names."""
    reference = ReferenceTransformer.from_config(CONFIG)

    def draw():
        return split(Transformer.from_config(CONFIG, rngs=nnx.Rngs(0)))[1]

    ours = carry_back(jax.jit(draw, compiler_options=QUICK)(), reference, "")
    return ours, {name: to_numpy(p) for name, p in parameters_of(reference).items()}


NAMES = sorted(parameters_of(ReferenceTransformer.from_config(CONFIG)))


def fan_in_of_bias(name):
    """Columns of the matrix that the bias belongs to."""
    return initialized()[1][name.replace("bias", "weight")].shape[1]


@pytest.mark.parametrize("framework", [0, 1], ids=["jax", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_follows_its_law(name, framework):
    values = initialized()[framework][name]
    assert values.dtype == np.float32
    if "norm" in name:
        np.testing.assert_array_equal(values, float(name.endswith("weight")))
        return
    bound = fan_in_of_bias(name) ** -0.5 if values.ndim == 1 else (6 / sum(values.shape)) ** 0.5
    # The largest of 512 uniform numbers is below 0.95 of the bound once in 10^11.
    assert 0.95 * bound <= np.abs(values).max() <= bound
    # The deviation of n uniform numbers is bound / sqrt(3), to sqrt(0.2 / n) of itself.
    assert values.std() * 3**0.5 / bound == pytest.approx(1, abs=5 * (0.2 / values.size) ** 0.5)
    assert abs(values.mean()) < 5 * bound / (3 * values.size) ** 0.5


@pytest.mark.parametrize("framework", [0, 1], ids=["jax", "torch"])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_each_attention_projection_counts_its_own_fan(projection, framework):
    # 0.0541 if q, k and v were one matrix, 0.0128 if the heads were taken for a window.
    values = initialized()[framework][f"encoder.layers.0.self_attn.{projection}.weight"]
    assert 0.95 * 0.0765 <= np.abs(values).max() <= 0.0766


def test_no_two_parameters_share_their_random_numbers():
    for parameters in initialized():
        drawn = [v for name, v in parameters.items() if "norm" not in name]
        firsts = {round(float(v.ravel()[0] / np.abs(v).max()), 6) for v in drawn}
        assert len(firsts) == len(drawn)


def test_the_seed_decides():
    kernels = [Linear(8, 8, rngs=nnx.Rngs(seed)).kernel[...] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])
