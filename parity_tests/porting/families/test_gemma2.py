import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import from_settings, read_config, write_config
from jax_transformer.porting.families.gemma2 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "sliding_window": 3,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=Gemma2ForCausalLM, config=Gemma2Config(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
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
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    ),
    example(
        "no caps, only windows",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        num_hidden_layers=1,
    ),
    example("no window", layer_types=["full_attention"] * 3),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_a_scale_that_is_no_whole_scalar_is_refused_on_the_way_back():
    settings = dict(FAMILY.fixed) | {
        "vocab_size": 31, "num_layers": 1, "max_len": 64, "tied": True, "layer.d_model": 24,
        "layer.d_ff": 40, "layer.num_heads": 6, "layer.head_dim": 8, "layer.num_kv_heads": 2,
        "layer.norm_epsilon": 1e-6, "layer.activation": "gelu_tanh", "layer.qkv_bias": False,
        "layer.out_bias": False, "layer.rotary.base": 1e4,
    }  # fmt: skip
    for scale in (0.3, None):
        config = from_settings(FAMILY, settings | {"layer.attention_scale": scale})
        with pytest.raises(InputError, match="attention_scale"):
            write_config(FAMILY, config)
    config = from_settings(FAMILY, settings | {"layer.attention_scale": 144**-0.5})
    assert write_config(FAMILY, config)["query_pre_attn_scalar"] == 144
    assert read_config(FAMILY, write_config(FAMILY, config)) == config
    with pytest.raises(InputError, match="query_pre_attn_scalar=0: must be a number above 0"):
        read_config(FAMILY, SIZES | {"query_pre_attn_scalar": 0})
