import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from jax_transformer.porting.families.qwen3 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=Qwen3ForCausalLM, config=Qwen3Config(**SIZES | settings)
    )


EXAMPLES = [
    example("plain", tie_word_embeddings=True),
    example(
        "no default left",
        attention_bias=True,
        rms_norm_eps=1e-3,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)
