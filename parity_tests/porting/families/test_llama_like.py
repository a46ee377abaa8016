"""What holds of each family that is built like Llama: nothing unknown passes."""

import dataclasses

import numpy as np
import pytest
from transformers import AutoConfig

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families import (
    family_of,
    gemma,
    gemma2,
    gemma3,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.plan import make_plan, make_plan_back
from parity_tests.porting.families.harness import skeleton

FAMILIES = [
    module.FAMILY for module in (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, olmo2)
]
SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture
def values(family):
    return SIZES | {"model_type": family.model_types[0]}


def test_it_is_known_by_its_model_type(family, values):
    assert family_of(values, "config.json") is family


def spelled_out(config):
    """The same with every width said."""

    def full(layer):
        return layer and dataclasses.replace(
            layer, num_kv_heads=layer.kv_heads, head_dim=layer.head_width
        )

    return dataclasses.replace(
        config, layer=full(config.layer), local_layer=full(config.local_layer)
    )


def test_the_defaults_are_those_of_transformers(family):
    # A file that says nothing (but its depth, where types of layers are counted), and one that the
    # class without arguments writes.
    theirs = AutoConfig.for_model(family.model_types[0])
    counted = any("layer_types" in entry.fields for entry in family.fields)
    ours = read_config(family, {"num_hidden_layers": theirs.num_hidden_layers} if counted else {})
    assert spelled_out(ours) == spelled_out(read_config(family, theirs.to_dict()))


def test_an_unknown_field_is_refused_with_the_nearest_names(family, values):
    with pytest.raises(InputError, match="'hidden_sizes' is not known, near hidden_size"):
        read_config(family, values | {"hidden_sizes": 24})


def test_a_stray_tensor_is_refused_and_a_known_buffer_is_not(family, values):
    config = read_config(family, values)
    target = flatten(skeleton(config)[1])
    shapes = {name: leaf.shape for name, leaf in target.items()}
    rules = family.rules(config)
    source = make_plan_back(rules, target).headers()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}
    assert make_plan(rules, source | buffer, shapes).ignored.keys() == buffer.keys()
    with pytest.raises(InputError, match=r"self_attn\.stray\.weight"):
        make_plan(rules, source | {"model.layers.0.self_attn.stray.weight": np.zeros(2)}, shapes)


def test_the_old_spelling_of_the_rotation_is_read(family, values):
    # Gemma 3 with two blocks has windows only, whose base has a name of its own.
    name = "rope_local_base_freq" if family is gemma3.FAMILY else "rope_theta"
    config = read_config(family, values | {name: 7})
    assert config.layer.rotary.base == 7.0
    assert write_config(family, config, values | {name: 7}) == values | {name: 7}


def test_an_unknown_rotation_is_refused(family, values):
    parameters = {"rope_type": "mrope"}
    if family is gemma3.FAMILY:
        parameters = {"sliding_attention": parameters}
    with pytest.raises(InputError, match="rope_type='mrope'"):
        read_config(family, values | {"rope_parameters": parameters})
