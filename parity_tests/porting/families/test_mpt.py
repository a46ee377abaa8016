from typing import Any

import numpy as np
import pytest
from transformers import MptConfig, MptForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.mpt import FAMILY
from jax_transformer.porting.plan import convert
from parity_tests.porting.families.harness import (
    Example,
    check_defaults,
    check_same_function,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 64,
}


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=MptForCausalLM, config=MptConfig(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        n_heads=12,
        layer_norm_epsilon=1e-3,
        emb_pdrop=0.2,
        resid_pdrop=0.3,
        learned_pos_emb=False,
        embedding_fraction=0.5,
        norm_type="layernorm",
        init_device="meta",
        tie_word_embeddings=False,
        attn_config={"softmax_scale": 0.6, "attn_impl": "flash"},
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=5000)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, MptConfig())


@pytest.mark.parametrize(
    "field",
    [
        {"attn_type": "multiquery_attention"},
        {"clip_qkv": 6.0},
        {"prefix_lm": True},
        {"qk_ln": True},
        {"attn_uses_sequence_id": True},
        {"alibi": False},
        {"alibi_bias_max": 16},
        {"stray": 1},
    ],
    ids=str,
)
def test_kinds_of_attention_that_are_not_built_are_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, SIZES | {"attn_config": field})


@pytest.mark.parametrize(
    "field",
    [
        {"expansion_ratio": 2},
        {"no_bias": False},
        {"logit_scale": 0.5},
        {"norm_type": "low_precision_rmsnorm"},
    ],
    ids=str,
)
def test_models_that_are_not_built_are_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, SIZES | field)


def test_queries_keys_and_values_lie_in_thirds():
    sizes: dict[str, Any] = SIZES | {"d_model": 4, "n_heads": 2, "n_layers": 1}
    config = read_config(FAMILY, sizes)
    tensors = tensors_of(MptForCausalLM(MptConfig(**sizes)))
    tensors["transformer.blocks.0.attn.Wqkv.weight"] = np.repeat(np.arange(12.0)[:, None], 4, 1)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    found = convert(FAMILY.rules(config), tensors, shapes)
    for start, name in zip((0, 4, 8), "qkv", strict=True):
        kernel = found[f"layers.0.self_attn.{name}_proj.kernel"]
        np.testing.assert_array_equal(kernel[0], np.arange(start, start + 4))
