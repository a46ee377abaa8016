import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.phi3 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.25, 2.0], "long_factor": [1.0, 4.0, 30.0]}


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=Phi3ForCausalLM, config=Phi3Config(**SIZES | settings)
    )


def longrope(**settings):
    return {"rope_type": "longrope", "rope_theta": 5e3, **FACTORS, **settings}


EXAMPLES = [
    example("plain", num_key_value_heads=None),
    example(
        "no default left, every row short",
        original_max_position_embeddings=64,
        rms_norm_eps=1e-3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        sliding_window=3,
        embd_pdrop=0.1,
        rope_parameters=longrope(partial_rotary_factor=0.75),
    ),
    # The shortest row has five tokens: each is beyond the original length.
    example(
        "every row long",
        original_max_position_embeddings=4,
        rope_parameters=longrope(partial_rotary_factor=0.75),
    ),
    example(
        "factors given",
        original_max_position_embeddings=4,
        rope_parameters=longrope(factor=6.0, attention_factor=1.25, partial_rotary_factor=0.75),
    ),
    example("head_dim, which the class reads but does not declare", head_dim=6),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_old_files_are_read_as_transformers_reads_them(kind):
    old = SIZES | {
        "model_type": "phi3", "auto_map": {"AutoConfig": "x"}, "attention_bias": False,
        "original_max_position_embeddings": 64, "rope_theta": 1e4, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": kind, **FACTORS},
    }  # fmt: skip
    config = read_config(FAMILY, old)
    # `transformers` 5 fails to read `su`, its own old name of it.
    new = {k: v for k, v in old.items() if k not in ("auto_map", "attention_bias")}
    new["rope_scaling"] = {"type": kind.replace("su", "longrope"), **FACTORS}
    assert config == read_config(FAMILY, example("", **new).values)
    rotary = config.layer.rotary
    assert (rotary.scaling, rotary.factor, rotary.original_max_len) == ("longrope", 2.0, 64)
    assert (rotary.width, rotary.long_factors) == (6, (1.0, 4.0, 30.0))
    assert write_config(FAMILY, config, old) == old


def test_what_its_code_does_not_have_is_refused():
    with pytest.raises(InputError, match="full_attn_mod=2: must be 1"):
        read_config(FAMILY, SIZES | {"full_attn_mod": 2})
    with pytest.raises(InputError, match="partial_rotary_factor=2: must be above 0"):
        read_config(FAMILY, SIZES | {"partial_rotary_factor": 2})
