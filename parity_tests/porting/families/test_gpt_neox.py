import dataclasses
from typing import Any

import numpy as np
import pytest
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.gpt_neox import FAMILY
from jax_transformer.porting.plan import make_plan, make_plan_back
from parity_tests.porting.families.harness import (
    Example,
    check_defaults,
    check_same_function,
    check_way_back,
    skeleton,
    tensors_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name,
        family=FAMILY,
        build=GPTNeoXForCausalLM,
        config=GPTNeoXConfig(**SIZES | settings),
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        hidden_act="gelu_new",
        layer_norm_eps=1e-3,
        use_parallel_residual=False,
        attention_bias=False,
        attention_dropout=0.2,
        hidden_dropout=0.3,
        classifier_dropout=0.4,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 5e3,
            "partial_rotary_factor": 0.75,
        },
    ),
    example("one after the other, with biases", use_parallel_residual=False, num_attention_heads=6),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_defaults_are_those_of_the_class():
    check_defaults(FAMILY, GPTNeoXConfig())


def test_pythia_s_spelling_of_the_rotation_is_read():
    new = EXAMPLES[0].values
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rotary_pct": 0.75, "rotary_emb_base": 500}
    new["rope_parameters"] |= {"partial_rotary_factor": 0.75, "rope_theta": 500.0}
    config: Any = read_config(FAMILY, old)
    assert config == read_config(FAMILY, new)
    assert (config.layer.rotary.width, config.layer.rotary.base) == (6, 500.0)
    assert GPTNeoXConfig(**old).rope_parameters == new["rope_parameters"]
    with pytest.raises(InputError, match=r"rotary_pct=1\.5"):
        read_config(FAMILY, old | {"rotary_pct": 1.5})


@pytest.mark.parametrize("head", range(2, 200, 6))
def test_every_rotated_width_is_written_as_a_fraction_that_reads_the_same(head):
    whole = {"rope_parameters": {"partial_rotary_factor": 1.0}}
    config: Any = read_config(FAMILY, EXAMPLES[0].values | whole | {"hidden_size": 3 * head})
    for width in range(2, head + 1, 2):
        rotary = dataclasses.replace(config.layer.rotary, width=width)
        layer = dataclasses.replace(config.layer, rotary=rotary)
        wanted = dataclasses.replace(config, layer=layer)
        assert read_config(FAMILY, write_config(FAMILY, wanted)) == wanted


@pytest.mark.parametrize("name", ["embed_out", "lm_head"])
def test_the_head_goes_by_either_name_and_by_that_of_files_back(name):
    plain = EXAMPLES[0]
    config = read_config(FAMILY, plain.values)
    rules = FAMILY.rules(config)
    shapes = {n: leaf.shape for n, leaf in flatten(skeleton(config)[1]).items()}
    tensors = tensors_of(plain.model())
    tensors[f"{name}.weight"] = tensors.pop("lm_head.weight")
    buffers = {
        f"gpt_neox.layers.0.attention.{buffer}": np.zeros(2)
        for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq")
    }
    plan = make_plan(rules, tensors | buffers, shapes)
    assert plan.ignored.keys() == buffers.keys()
    assert "embed_out.weight" in make_plan_back(rules, plan.headers()).headers()
