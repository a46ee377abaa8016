"""Fresh parameters follow the same law in both frameworks: Xavier-uniform matrices and PyTorch's
biases in the encoder-decoder, GPT-2's normal numbers in the language models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jax_transformer.config import ModelConfig
from jax_transformer.config.presets import PRESETS
from jax_transformer.layers.linear import Linear
from jax_transformer.models import DecoderOnly, EncoderOnly
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import split
from parity_tests.harness import QUICK, carry_back, parameters_of, to_numpy
from torch_reference import models as reference_models
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


def narrow(config, **changes):
    """A configuration of 128 features in place of its own."""
    small = {"d_model": 128, "num_heads": 4, "d_ff": 512, "num_kv_heads": None}
    layer = dataclasses.replace(config.layer, **small)
    return dataclasses.replace(config, layer=layer, vocab_size=3000, **changes)


LANGUAGE_MODELS = {
    "GPT-2": narrow(PRESETS["gpt2-small"], max_len=500),
    "Llama with scaled embeddings": narrow(
        PRESETS["llama-2-7b"], num_layers=3, embedding_scale=True, head_bias=True
    ),
    "tied and scaled": narrow(PRESETS["smollm2-135m"], num_layers=3, embedding_scale=True),
    "BERT": narrow(PRESETS["bert-base"], num_layers=2, max_len=500, token_head=True),
}


@functools.cache
def initialized_language_model(name):
    """As `initialized`."""
    config = LANGUAGE_MODELS[name]
    ours, theirs = DecoderOnly, reference_models.DecoderOnly
    if name == "BERT":
        ours, theirs = EncoderOnly, reference_models.EncoderOnly
    reference = theirs(config)

    def draw():
        return split(ours(config, rngs=nnx.Rngs(0)))[1]

    drawn = carry_back(jax.jit(draw, compiler_options=QUICK)(), reference, "")
    return drawn, {name: to_numpy(p) for name, p in parameters_of(reference).items()}


def deviation(model, name):
    """That of GPT-2's code, by hand."""
    config = LANGUAGE_MODELS[model]
    if name == "embedding.weight" and config.embedding_scale:
        return 128**-0.5
    ends = ("self_attn.out_proj.weight", "ffn.linear2.weight", "ffn.down_proj.weight")
    if name.endswith(ends) and model != "BERT":
        return {12: 0.02 / 24**0.5, 3: 0.02 / 6**0.5}[config.num_layers]
    return 0.02


@pytest.mark.parametrize("framework", [0, 1], ids=["jax", "torch"])
@pytest.mark.parametrize("model", LANGUAGE_MODELS)
def test_language_models_are_normal_with_small_projections_into_the_residual_stream(
    model, framework
):
    parameters = initialized_language_model(model)[framework]
    small = 0
    for name, values in parameters.items():
        assert values.dtype == np.float32
        if values.ndim == 1:
            constant = float("norm" in name and name.endswith("weight"))
            np.testing.assert_array_equal(values, constant, err_msg=name)
            continue
        std = deviation(model, name)
        small += std < 0.02
        # Of n numbers the deviation is off by 1 / sqrt(2n) of itself, the mean by std / sqrt(n).
        n = values.size
        assert values.std() / std == pytest.approx(1, abs=5 * (0.5 / n) ** 0.5), name
        assert abs(values.mean()) < 5 * std / n**0.5, name
        # Not uniform: one in 370 is beyond three deviations.
        assert n < 3000 or np.abs(values).max() > 3 * std, name
    assert small == (0 if model == "BERT" else 2 * LANGUAGE_MODELS[model].num_layers)


@pytest.mark.parametrize("model", LANGUAGE_MODELS)
def test_no_two_parameters_of_a_language_model_share_their_random_numbers(model):
    for parameters in initialized_language_model(model):
        drawn = [v for v in parameters.values() if v.ndim > 1]
        firsts = {round(float(v.ravel()[0] / v.std()), 6) for v in drawn}
        assert len(firsts) == len(drawn)
