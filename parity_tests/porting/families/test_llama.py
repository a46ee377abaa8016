import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from jax_transformer.porting.families.llama import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=LlamaForCausalLM, config=LlamaConfig(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        attention_bias=True,
        mlp_bias=True,
        head_dim=8,
        rms_norm_eps=1e-3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
    ),
    example(
        "llama3",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    # Of heads so wide that both borders lie between pairs, and shift what is between them.
    example(
        "yarn",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 8.0,
            "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3,
            "original_max_position_embeddings": 64,
        },
    ),
    example(
        "yarn, borders between whole pairs",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.3,
            "original_max_position_embeddings": 32,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)
