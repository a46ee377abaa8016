from typing import Any

import numpy as np
import pytest
from transformers import T5Config, T5ForConditionalGeneration

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families import family_of
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.t5 import FAMILY
from jax_transformer.porting.plan import convert, make_plan
from parity_tests.porting.families.encoder_decoders import Translation, check_same_translation
from parity_tests.porting.families.harness import (
    check_defaults,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip


def example(name, **settings):
    config = T5Config(**SIZES | settings)
    return Translation(name=name, family=FAMILY, build=T5ForConditionalGeneration, config=config)


EXAMPLES = [
    example("1.0", num_decoder_layers=1),
    example(
        "1.1, no default left",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
        dropout_rate=0.3,
        n_positions=99,
        classifier_dropout=0.2,
    ),
]
OLD, NEW = EXAMPLES


def parts(example):
    config = read_config(FAMILY, example.values)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    return FAMILY.rules(config), tensors_of(example.model()), shapes


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_translation(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, T5Config())


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_published_files_say_the_same_in_fewer_words(example):
    values, tied = example.values, example is OLD
    new = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "classifier_dropout")
    published = {name: value for name, value in values.items() if name not in new}
    published = {"n_positions": 512} | published
    published |= {"tie_word_embeddings": tied, "output_past": True}
    published |= {"task_specific_params": {"translation": {"prefix": "translate: "}}}
    if tied:
        del published["tie_word_embeddings"]
    config: Any = read_config(FAMILY, published)
    assert config == read_config(FAMILY, values)
    assert config.tied == tied
    assert config.logit_scale == (24**-0.5 if tied else 1.0)
    assert write_config(FAMILY, config, published) == published
    assert family_of(published, "config.json") is FAMILY


def test_the_names_that_transformers_maps_are_read():
    others = {
        "hidden_size": "d_model", "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads", "head_dim": "d_kv",
    }  # fmt: skip
    values = OLD.values
    renamed = {other: values[name] for other, name in others.items()}
    rest = {name: value for name, value in values.items() if name not in others.values()}
    assert read_config(FAMILY, renamed | rest) == read_config(FAMILY, values)
    del rest["num_decoder_layers"]
    config: Any = read_config(FAMILY, renamed | rest)
    assert config.num_decoder_layers == values["num_layers"]


@pytest.mark.parametrize(
    "name", ["relu", "gelu", "silu", "gelu_new", "quick_gelu", "gated-gelu", "gated-silu"]
)
def test_every_feed_forward_layer_is_written_as_it_was(name):
    # The config's class knows what to make of it, too.
    config = T5Config(**SIZES | {"feed_forward_proj": name})
    values = Translation(
        name=name, family=FAMILY, build=T5ForConditionalGeneration, config=config
    ).values
    ours: Any = read_config(FAMILY, values)
    written = write_config(FAMILY, ours)["feed_forward_proj"]
    again = T5Config(**SIZES | {"feed_forward_proj": written})
    same = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
    assert same.get(again.dense_act_fn, again.dense_act_fn) == config.dense_act_fn
    assert again.is_gated_act == config.is_gated_act == ours.encoder.gated == ours.decoder.gated


def test_a_bias_of_cross_attention_is_not_read_and_anything_else_is_refused():
    rules, tensors, shapes = parts(OLD)
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert make_plan(rules, tensors | {name: np.zeros((8, 3))}, shapes).ignored.keys() == {name}
    with pytest.raises(InputError, match=r"block\.0\.stray"):
        convert(rules, tensors | {"decoder.block.0.stray": np.zeros(2)}, shapes)


def test_a_file_with_a_second_name_of_its_table_only_is_understood():
    rules, tensors, shapes = parts(OLD)
    expected = convert(rules, tensors, shapes)
    other = "encoder.embed_tokens.weight"
    aliases = ("shared.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    found = convert(rules, {n: a for n, a in tensors.items() if n not in aliases}, shapes)
    assert other in tensors
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_head_of_its_own_is_refused_where_the_config_says_tied():
    rules, tensors, shapes = parts(OLD)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(InputError, match="hold different numbers"):
        convert(rules, tensors, shapes)


@pytest.mark.parametrize(
    "field",
    [
        {"feed_forward_proj": "gated-mish"},
        {"dense_act_fn": "gelu_new"},
        {"is_gated_act": True},
        {"tie_word_embeddings": False},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, OLD.values | field)
