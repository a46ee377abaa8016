import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.gemma3 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "sliding_window": 3,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name,
        family=FAMILY,
        build=Gemma3ForCausalLM,
        config=Gemma3TextConfig(**SIZES | settings),
    )


EXAMPLES = [
    example("every other", sliding_window_pattern=2),
    example(
        "no default left",
        attention_bias=True,
        rms_norm_eps=1e-3,
        hidden_activation="silu",
        tie_word_embeddings=False,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    example("only windows", num_hidden_layers=2),
    example("no window", layer_types=["full_attention"] * 3),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_old_files_are_read_as_transformers_reads_them():
    old = SIZES | {
        "model_type": "gemma3_text", "cache_implementation": "hybrid", "sliding_window_pattern": 2,
        "rope_theta": 2e6, "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    config = read_config(FAMILY, old)
    new = Gemma3TextConfig(**old)
    assert config == read_config(FAMILY, example("", **old).values)
    assert new.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.local_layers == (0, 2)
    assert (config.layer.rotary.base, config.layer.rotary.factor) == (2e6, 8.0)
    assert config.local_layer.rotary.base == 5e3
    assert config.local_layer.rotary.scaling == "none"
    assert write_config(FAMILY, config, old) == old


def test_bases_that_no_field_says_are_those_of_transformers():
    config = read_config(FAMILY, SIZES | {"num_hidden_layers": 6})
    assert config.local_layers == (0, 1, 2, 3, 4)
    assert (config.layer.rotary.base, config.local_layer.rotary.base) == (1e6, 1e4)


def test_rope_parameters_of_no_type_of_layer_are_refused():
    with pytest.raises(InputError, match=r"rope_parameters\.rope_theta: must be under"):
        read_config(FAMILY, SIZES | {"rope_parameters": {"rope_theta": 1e4}})
