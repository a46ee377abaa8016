"""Every preset has the number of parameters that was published, in both frameworks."""

import dataclasses
from unittest import mock

import jax
import pytest
import torch
from flax import nnx

from jax_transformer.config import (
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    ModelConfig,
    from_dict,
)
from jax_transformer.config.presets import PRESETS, preset
from jax_transformer.errors import InputError
from jax_transformer.models import DecoderOnly, EncoderOnly, Transformer, count_parameters
from jax_transformer.models.encoder_decoder import EncoderDecoder
from torch_reference import models as reference
from torch_reference.models.encoder_decoder import EncoderDecoder as ReferenceEncoderDecoder

# Of the checkpoints, a tied table once; BERT with its pooler, without the head for masked tokens.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "bloom-560m": 559_214_592,
    "bert-base": 109_482_240,
    "t5-small": 60_506_624,
}


def of_paper(d_model, d_ff, vocab_size=37_000, layers=6):
    """Vaswani et al. 2017 by hand: every projection with a bias, two and three norms a layer,
    a norm at the end of each half (the lecture document's), a bias of the logits."""
    attention = 4 * (d_model * d_model + d_model)
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    norm = 2 * d_model
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return layers * (encoder + decoder) + 2 * norm + vocab_size * d_model + vocab_size


def build(name):
    """The JAX model with shapes in place of arrays."""
    config = PRESETS[name]
    kinds = {ModelConfig: Transformer.from_config, DecoderOnlyConfig: DecoderOnly}
    kinds |= {EncoderOnlyConfig: EncoderOnly}
    make = kinds.get(type(config), EncoderDecoder)
    # Shapes need no keys, and `nnx.Rngs` takes longer to trace for each that it has given.
    with mock.patch.object(nnx.RngStream, "__call__", return_value=jax.random.key(0)):
        return nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))


def count_torch(config):
    kinds = {
        ModelConfig: reference.Transformer.from_config,
        DecoderOnlyConfig: reference.DecoderOnly,
        EncoderOnlyConfig: reference.EncoderOnly,
    }
    with torch.device("meta"):
        model = kinds.get(type(config), ReferenceEncoderDecoder)(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert count_parameters(build(name)) == PUBLISHED[name]
    assert count_torch(PRESETS[name]) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [("original-base", (512, 2048), 65e6), ("original-big", (1024, 4096), 213e6)],
)
def test_the_original_models_have_the_size_of_the_paper(name, sizes, published):
    assert count_parameters(build(name)) == count_torch(PRESETS[name]) == of_paper(*sizes)
    # The paper gives millions, and "about 37000" tokens.
    assert of_paper(*sizes) == pytest.approx(published, rel=0.03)


def test_every_preset_is_counted():
    assert set(PRESETS) == {*PUBLISHED, "original-base", "original-big"}


def test_with_its_head_bert_has_the_parameters_of_its_pretraining_but_for_the_next_sentence():
    config = dataclasses.replace(PRESETS["bert-base"], token_head=True)
    assert count_torch(config) == 110_106_428 - (2 * 768 + 2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_dictionary(name):
    config = preset(name)
    assert from_dict(type(config), config.to_dict(), place="preset") == config


def test_an_unknown_preset_is_refused_with_the_nearest_names():
    with pytest.raises(InputError, match="unknown preset 'gpt2-smal': did you mean gpt2-small"):
        preset("gpt2-smal")
    with pytest.raises(InputError, match="there are original-base, original-big, gpt2-small"):
        preset("?")
