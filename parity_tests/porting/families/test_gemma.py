import pytest
from transformers import GemmaConfig, GemmaForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.gemma import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8,
}  # fmt: skip


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=GemmaForCausalLM, config=GemmaConfig(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        num_key_value_heads=1,
        attention_bias=True,
        rms_norm_eps=1e-3,
        hidden_act="silu",
        tie_word_embeddings=False,
        use_bidirectional_attention=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


def test_gelu_in_its_files_is_the_approximation():
    fields = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None}
    assert GemmaConfig(**fields).hidden_act == "gelu_pytorch_tanh"
    assert read_config(FAMILY, SIZES | fields).layer.activation == "gelu_tanh"


def test_attention_in_both_directions_is_refused():
    with pytest.raises(InputError, match="use_bidirectional_attention=True: must be None"):
        read_config(FAMILY, SIZES | {"use_bidirectional_attention": True})
