from typing import Any

import numpy as np
import pytest
from transformers import BartConfig, BartForConditionalGeneration

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.bart import FAMILY
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.plan import convert
from parity_tests.porting.families.encoder_decoders import S, Translation, check_same_translation
from parity_tests.porting.families.harness import (
    check_defaults,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36, "max_position_embeddings": S,
}  # fmt: skip


def example(name, **settings):
    config = BartConfig(**SIZES | settings)
    return Translation(name=name, family=FAMILY, build=BartForConditionalGeneration, config=config)


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        scale_embedding=True,
        activation_function="relu",
        dropout=0.2,
        attention_dropout=0.3,
        activation_dropout=0.4,
        encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
        classifier_dropout=0.1,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_translation(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, BartConfig())


def test_the_bare_model_has_no_prefix_and_no_bias_of_logits():
    values = EXAMPLES[0].values | {"architectures": ["BartModel"]}
    config: Any = read_config(FAMILY, values)
    assert not config.head_bias
    assert write_config(FAMILY, config)["architectures"] == ["BartModel"]
    tensors = {
        name.removeprefix("model."): array
        for name, array in tensors_of(EXAMPLES[0].model()).items()
        if name not in ("lm_head.weight", "final_logits_bias")
    }
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    found = convert(FAMILY.rules(config), tensors, shapes)
    assert found.keys() == shapes.keys()
    with pytest.raises(InputError, match="stray"):
        convert(FAMILY.rules(config), tensors | {"encoder.stray": np.zeros(2)}, shapes)


def test_old_files_say_the_same_in_more_words():
    values = EXAMPLES[0].values
    old = {
        "num_hidden_layers": 2, "normalize_embedding": True, "normalize_before": False,
        "static_position_embeddings": False, "extra_pos_embeddings": 2, "add_bias_logits": False,
        "add_final_layer_norm": False, "classif_dropout": 0.1, "early_stopping": True,
        "no_repeat_ngram_size": 3, "length_penalty": 2.0, "min_length": 56, "output_past": True,
    }  # fmt: skip
    assert read_config(FAMILY, values | old) == read_config(FAMILY, values)


@pytest.mark.parametrize(
    "field",
    [
        {"tie_word_embeddings": False},
        {"normalize_before": True},
        {"static_position_embeddings": True},
        {"add_final_layer_norm": True},
        {"add_bias_logits": True},
        {"normalize_embedding": False},
        {"extra_pos_embeddings": 0},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, EXAMPLES[0].values | field)
