import pytest
from transformers import Olmo2Config, Olmo2ForCausalLM

from jax_transformer.porting.families.olmo2 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 1,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=Olmo2ForCausalLM, config=Olmo2Config(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        num_key_value_heads=None,
        attention_bias=True,
        rms_norm_eps=1e-3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    example("head_dim, which the class reads but does not declare", head_dim=6),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)
