from typing import Any

import numpy as np
import pytest
from transformers import MarianConfig, MarianMTModel

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.marian import FAMILY
from jax_transformer.porting.plan import convert, make_plan
from parity_tests.porting.families.encoder_decoders import S, Translation, check_same_translation
from parity_tests.porting.families.harness import (
    buffers_of,
    check_defaults,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 36, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 32, "max_position_embeddings": S, "pad_token_id": 35,
    "decoder_start_token_id": 35, "eos_token_id": 7, "forced_eos_token_id": 7,
}  # fmt: skip


def example(name, **settings):
    config = MarianConfig(**SIZES | settings)
    return Translation(name=name, family=FAMILY, build=MarianMTModel, config=config)


EXAMPLES = [
    example("one vocabulary", activation_function="swish", scale_embedding=True),
    example(
        "two vocabularies",
        decoder_vocab_size=52,
        share_encoder_decoder_embeddings=False,
        dropout=0.2,
        attention_dropout=0.3,
        activation_dropout=0.4,
        encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
    ),
    example(
        "three tables",
        decoder_vocab_size=40,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_translation(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, MarianConfig())


def test_the_table_of_positions_is_that_of_the_file_and_not_read_from_it():
    example = EXAMPLES[0]
    config = read_config(FAMILY, example.values)
    tensors = tensors_of(example.model())
    pe = flatten(buffers_of(config))
    for half in ("encoder", "decoder"):
        theirs = tensors[f"model.{half}.embed_positions.weight"]
        np.testing.assert_array_equal(pe[f"{half}.pos_encoding.pe"][0], theirs.astype(np.float32))
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    ignored = make_plan(FAMILY.rules(config), tensors, shapes).ignored
    assert set(ignored) == {
        f"model.{half}.embed_positions.weight" for half in ("encoder", "decoder")
    }


def test_each_vocabulary_has_its_size():
    config: Any = read_config(FAMILY, EXAMPLES[1].values)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    assert shapes["output_proj.bias"] == (52,)
    assert shapes["encoder.embedding.embedding"] == (36, 24)
    tensors = tensors_of(EXAMPLES[1].model())
    with pytest.raises(InputError, match="stray"):
        convert(FAMILY.rules(config), tensors | {"model.encoder.stray": np.zeros(2)}, shapes)


def test_old_files_say_the_same_in_more_words():
    values = EXAMPLES[0].values
    old = {
        "num_hidden_layers": 2, "normalize_embedding": False, "normalize_before": False,
        "static_position_embeddings": True, "extra_pos_embeddings": 36, "add_bias_logits": False,
        "add_final_layer_norm": False, "classif_dropout": 0.0, "bad_words_ids": [[35]],
        "num_beams": 6, "max_length": 512,
    }  # fmt: skip
    without = {name: value for name, value in values.items() if name != "decoder_vocab_size"}
    assert read_config(FAMILY, without | old) == read_config(FAMILY, values)


@pytest.mark.parametrize(
    "field",
    [
        {"tie_word_embeddings": False},
        {"normalize_before": True},
        {"static_position_embeddings": False},
        {"add_final_layer_norm": True},
        {"add_bias_logits": True},
        {"normalize_embedding": True},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, EXAMPLES[0].values | field)
