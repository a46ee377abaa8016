import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.qwen2 import FAMILY
from parity_tests.porting.families.harness import Example, check_same_function, check_way_back

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 3}


def example(name, **settings):
    return Example(
        name=name, family=FAMILY, build=Qwen2ForCausalLM, config=Qwen2Config(**SIZES | settings)
    )


EXAMPLES = [
    example("plain"),
    example(
        "no default left",
        rms_norm_eps=1e-3,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        max_window_layers=1,
        **WINDOW,
    ),
    example(
        "layers listed",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **WINDOW,
    ),
    example("head_dim, which the class reads but does not declare", head_dim=6),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_logits_are_those_of_transformers(example):
    check_same_function(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


# As files of before `layer_types` say it: what is windowed of three layers.
OLD = [
    ({"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}, ()),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
    (WINDOW | {"max_window_layers": 2}, (2,)),
    (WINDOW | {"max_window_layers": 5}, ()),
    (WINDOW | {"max_window_layers": 0}, (0, 1, 2)),
    (WINDOW, ()),
]


@pytest.mark.parametrize(("fields", "windowed"), OLD)
def test_windows_of_old_files_are_those_of_transformers(fields, windowed):
    values = SIZES | {"model_type": "qwen2", "rope_theta": 1e6} | fields
    types = Qwen2Config(**SIZES | fields).layer_types
    assert tuple(i for i in range(3) if types[i] == "sliding_attention") == windowed
    config = read_config(FAMILY, values)
    layers = [config.layer_at(index) for index in range(3)]
    assert tuple(i for i in range(3) if layers[i].window == 3) == windowed
    assert {layer.window for layer in layers} <= {3, None}
    assert write_config(FAMILY, config, values) == values
    assert read_config(FAMILY, write_config(FAMILY, config)) == config
    # A second spelling of the same is kept, another meaning is not.
    other = SIZES | {"model_type": "qwen2", **WINDOW, "max_window_layers": 1}
    written = write_config(FAMILY, config, other)
    assert read_config(FAMILY, written) == config
    assert "max_window_layers" in written


def test_layer_types_that_do_not_fit_are_refused():
    for types, message in (
        (["full_attention"] * 2, "2 entries for num_hidden_layers=3"),
        (["full_attention"] * 2 + ["chunked_attention"], "chunked_attention"),
        (["full_attention"] * 2 + ["sliding_attention"], "sliding_window is missing"),
    ):
        with pytest.raises(InputError, match=message):
            read_config(FAMILY, SIZES | {"layer_types": types})
