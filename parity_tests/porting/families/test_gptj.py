from typing import Any

import numpy as np
import pytest
from transformers import GPTJConfig, GPTJForCausalLM

from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.gptj import FAMILY
from jax_transformer.porting.plan import make_plan
from parity_tests.porting.families.harness import (
    Example,
    check_defaults,
    check_same_function,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "rotary_dim": 4,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=GPTJForCausalLM, config=GPTJConfig(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        n_inner=40,
        rotary_dim=8,
        activation_function="relu",
        layer_norm_epsilon=1e-3,
        resid_pdrop=0.2,
        embd_pdrop=0.3,
        attn_pdrop=0.4,
        tie_word_embeddings=True,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, GPTJConfig())


def test_buffers_of_old_files_are_ignored():
    plain = EXAMPLES[0]
    config = read_config(FAMILY, plain.values)
    shapes = {name: leaf.shape for name, leaf in flatten(skeleton(config)[1]).items()}
    buffers = {
        f"transformer.h.0.attn.{name}": np.zeros(2)
        for name in ("bias", "masked_bias", "embed_positions")
    }
    plan = make_plan(FAMILY.rules(config), tensors_of(plain.model()) | buffers, shapes)
    assert plan.ignored.keys() == buffers.keys()
