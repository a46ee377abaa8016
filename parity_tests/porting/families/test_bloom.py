from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom import modeling_bloom

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.bloom import FAMILY
from jax_transformer.porting.plan import convert
from parity_tests.porting.families.harness import (
    Example,
    check_defaults,
    check_same_function,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 24, "n_layer": 2, "n_head": 4}


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=BloomForCausalLM, config=BloomConfig(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        n_head=12,
        layer_norm_epsilon=1e-3,
        hidden_dropout=0.2,
        attention_dropout=0.3,
        pretraining_tp=2,
        tie_word_embeddings=False,
        seq_length=77,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    # Which has eight digits of sqrt(2 / pi) there: the logits would be off by 1e-10.
    exact = mock.patch.object(
        modeling_bloom, "bloom_gelu_forward", lambda x: functional.gelu(x, approximate="tanh")
    )
    with exact:
        check_same_function(example, last=5000)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, BloomConfig())


def test_the_published_config_is_read():
    published = {
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
        "model_type": "bloom", "n_embed": 24, "n_inner": None, "n_layer": 2,
        "num_attention_heads": 4, "offset_alibi": 100, "pretraining_tp": 1,
        "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False,
        "slow_but_exact": False, "transformers_version": "4.20.0", "use_cache": True,
        "vocab_size": 31,
    }  # fmt: skip
    assert read_config(FAMILY, published) == read_config(FAMILY, EXAMPLES[0].values)
    for name in ("apply_residual_connection_post_layernorm", "slow_but_exact"):
        with pytest.raises(InputError, match=f"{name}=True"):
            read_config(FAMILY, published | {name: True})


def test_queries_keys_and_values_of_each_head_lie_together():
    sizes: dict[str, Any] = SIZES | {"hidden_size": 4, "n_head": 2, "n_layer": 1}
    config = read_config(FAMILY, sizes)
    tensors = tensors_of(BloomForCausalLM(BloomConfig(**sizes)))
    fused = "transformer.h.0.self_attention.query_key_value"
    tensors[f"{fused}.bias"] = np.arange(12.0)
    tensors[f"{fused}.weight"] = np.repeat(np.arange(12.0)[:, None], 4, axis=1)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    found = convert(FAMILY.rules(config), tensors, shapes)
    rows = {"q": [0, 1, 6, 7], "k": [2, 3, 8, 9], "v": [4, 5, 10, 11]}
    for name, expected in rows.items():
        projection = f"layers.0.self_attn.{name}_proj"
        np.testing.assert_array_equal(found[f"{projection}.bias"], expected)
        np.testing.assert_array_equal(found[f"{projection}.kernel"][0], expected)


def test_files_of_the_bare_model_are_the_same_model():
    config = read_config(FAMILY, EXAMPLES[0].values)
    tensors = tensors_of(EXAMPLES[0].model())
    bare = {
        name.removeprefix("transformer."): array
        for name, array in tensors.items()
        if name != "lm_head.weight"
    }
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    expected = convert(FAMILY.rules(config), tensors, shapes)
    found = convert(FAMILY.rules(config), bare, shapes)
    assert found.keys() == expected.keys()
