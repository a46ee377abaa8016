from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, BertForMaskedLM, BertModel

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.bert import FAMILY
from jax_transformer.porting.plan import convert, make_plan
from parity_tests.porting.families.encoders import check_same_encoder
from parity_tests.porting.families.harness import (
    Example,
    check_defaults,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64,
}  # fmt: skip
NO_DEFAULT_LEFT: dict[str, Any] = {
    "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 5,
    "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4,
}  # fmt: skip


def example(name, build, **settings):
    config = BertConfig(architectures=[build.__name__], **SIZES | settings)
    return Example(name=name, family=FAMILY, build=build, config=config)


EXAMPLES = [
    example("masked tokens", BertForMaskedLM),
    example("masked tokens, no default left", BertForMaskedLM, **NO_DEFAULT_LEFT),
    example("bare", BertModel),
    example("bare, no default left", BertModel, **NO_DEFAULT_LEFT),
]
HEAD, _, BARE, _ = EXAMPLES


def shapes_of(example):
    config = read_config(FAMILY, example.values)
    return {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}


def rules_of(example):
    return FAMILY.rules(read_config(FAMILY, example.values))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_outputs_are_those_of_transformers(example):
    check_same_encoder(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, BertConfig())


@pytest.mark.parametrize("example", [HEAD, BARE], ids=str)
def test_the_class_is_written(example):
    config = read_config(FAMILY, example.values)
    assert write_config(FAMILY, config)["architectures"] == [example.build.__name__]


def test_google_s_names_of_norms_and_parts_without_a_place_are_understood():
    tensors = tensors_of(HEAD.model())
    expected = convert(rules_of(HEAD), tensors, shapes_of(HEAD))
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): array
        for name, array in tensors.items()
        if "decoder" not in name
    }
    extra = {
        "bert.embeddings.position_ids": np.arange(64)[None],
        "bert.pooler.dense.weight": np.zeros((24, 24)),
        "bert.pooler.dense.bias": np.zeros(24),
        "cls.seq_relationship.weight": np.zeros((2, 24)),
        "cls.seq_relationship.bias": np.zeros(2),
    }
    assert make_plan(rules_of(HEAD), old | extra, shapes_of(HEAD)).ignored.keys() == extra.keys()
    found = convert(rules_of(HEAD), old | extra, shapes_of(HEAD))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_the_bare_model_is_found_in_a_file_of_a_model_with_a_head():
    tensors = tensors_of(HEAD.model())
    pooler = {n: a for n, a in tensors_of(BARE.model()).items() if n.startswith("pooler")}
    whole = tensors | {f"bert.{name}": array for name, array in pooler.items()}
    found = convert(rules_of(BARE), whole, shapes_of(BARE))
    assert found.keys() == shapes_of(BARE).keys()


def test_a_head_with_a_table_of_its_own_is_refused():
    tensors = tensors_of(HEAD.model())
    tensors["cls.predictions.decoder.weight"] = tensors["cls.predictions.decoder.weight"] + 1
    with pytest.raises(InputError, match="hold different numbers"):
        convert(rules_of(HEAD), tensors, shapes_of(HEAD))


def test_a_stray_tensor_is_refused():
    tensors = tensors_of(HEAD.model()) | {"bert.encoder.layer.0.stray": np.zeros(2)}
    with pytest.raises(InputError, match=r"layer\.0\.stray"):
        convert(rules_of(HEAD), tensors, shapes_of(HEAD))


@pytest.mark.parametrize(
    "field",
    [
        {"architectures": ["BertForSequenceClassification"]},
        {"tie_word_embeddings": False},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"add_cross_attention": True},
        {"pruned_heads": {"0": [1]}},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, HEAD.values | field)
