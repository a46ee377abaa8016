from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.gpt2 import FAMILY
from jax_transformer.porting.plan import convert, convert_back
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
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=GPT2LMHeadModel, config=GPT2Config(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        n_inner=40,
        activation_function="quick_gelu",
        layer_norm_epsilon=1e-3,
        resid_pdrop=0.2,
        embd_pdrop=0.3,
        attn_pdrop=0.4,
        scale_attn_weights=False,
        reorder_and_upcast_attn=True,
        tie_word_embeddings=False,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_files_of_the_bare_model_and_with_old_masks_are_the_same_model():
    plain = EXAMPLES[0]
    config = read_config(FAMILY, plain.values)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    tensors = tensors_of(plain.model())
    bare = {
        name.removeprefix("transformer."): array
        for name, array in tensors.items()
        if name != "lm_head.weight"
    }
    masks = {
        "h.0.attn.bias": np.tri(64, dtype=bool)[None, None],
        "h.1.attn.masked_bias": np.array(-1e4),
    }
    expected = convert(FAMILY.rules(config), tensors, shapes)
    found = convert(FAMILY.rules(config), bare | masks, shapes)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    back = convert_back(
        FAMILY.rules(config), found, {name: array.shape for name, array in bare.items()}
    )
    assert back.keys() == bare.keys()
    with pytest.raises(InputError, match=r"h\.0\.attn\.stray"):
        convert(FAMILY.rules(config), bare | {"h.0.attn.stray": np.zeros(2)}, shapes)


def test_the_names_that_transformers_maps_are_read():
    values = EXAMPLES[1].values
    config = read_config(FAMILY, values)
    others = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }  # fmt: skip
    renamed = {other: values[name] for other, name in others.items()}
    rest = {name: value for name, value in values.items() if name not in others.values()}
    assert read_config(FAMILY, renamed | rest | {"n_ctx": 64}) == config
    with pytest.raises(InputError, match="are one setting"):
        read_config(FAMILY, values | {"hidden_size": 23})


@pytest.mark.parametrize(
    "field",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
        {"activation_function": "mish"},
        {"stray": 1},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        read_config(FAMILY, EXAMPLES[0].values | field)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, GPT2Config())
