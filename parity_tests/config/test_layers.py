"""A block's configuration refuses what does not go together, in one line."""

import dataclasses
import json

import pytest

from jax_transformer.config import LayerConfig, RotaryConfig, from_dict
from jax_transformer.errors import InputError

LAYER = LayerConfig(d_model=20, num_heads=4, d_ff=8, causal=True)
ROTARY = RotaryConfig(pairing="half")


def test_heads_are_as_wide_as_the_model_has_room_for_unless_told_otherwise():
    assert (LAYER.head_width, LAYER.kv_heads) == (5, 4)
    wide = dataclasses.replace(LAYER, head_dim=8, num_kv_heads=2)
    assert (wide.head_width, wide.kv_heads) == (8, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "d_model=20 is not divisible by num_heads=3"),
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be a whole number of at least 1"),
        ({"head_dim": 2.0}, r"head_dim=2\.0: must be a whole number"),
        ({"d_ff": True}, "d_ff=True: must be a whole number"),
        ({"key_bias": False, "qkv_bias": False}, "key_bias=False with qkv_bias=False"),
        ({"window": -1}, "window=-1: must be a whole number"),
        ({"window": 4, "causal": False}, "window=4: only causal attention"),
        ({"norm": "group"}, "norm='group': must be one of layer, rms"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon=0\.0: must be a finite number above 0"),
        ({"norm_unit_offset": True}, "belong to norm='rms'"),
        ({"norm_scale_in_float32": True}, "belong to norm='rms'"),
        ({"placement": "before"}, "placement='before': must be one of post, pre"),
        ({"parallel_norms": 3}, "parallel_norms=3: must be 1 or 2"),
        ({"query_key_norm": True}, "query_key_norm=True: must be one of none, head, full"),
        ({"attention_scale": float("inf")}, "attention_scale=inf: must be a finite number"),
        ({"attention_soft_cap": 0}, "attention_soft_cap=0: must be a finite number above 0"),
        ({"activation": "swish"}, "activation='swish': must be one of gelu"),
        ({"dropout": 1.0}, r"dropout=1\.0: must be at least 0 and below 1"),
        ({"dropout": None}, "dropout=None: must be at least 0 and below 1"),
        ({"rotary": ROTARY}, "a head is 5 wide: rotary positions turn pairs"),
        (
            {"rotary": RotaryConfig(pairing="half", width=6)},
            r"rotary\.width=6: a head is only 5 wide",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        dataclasses.replace(LAYER, **changes)
    assert "\n" not in str(caught.value)


def test_a_saved_configuration_is_the_same_when_read():
    for rotary in (None, RotaryConfig(pairing="adjacent", width=4, base=5e5)):
        layer = dataclasses.replace(LAYER, rotary=rotary, gated=True, attention_scale=2)
        saved = json.loads(json.dumps(dataclasses.asdict(layer)))
        assert from_dict(LayerConfig, saved, place="here") == layer


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gated", 1, "here: gated=1: must be true or false"),
        ("num_kv_heads", 2.5, r"here: num_kv_heads=2\.5: must be a whole number"),
        ("num_kv_heads", True, "here: num_kv_heads=True: must be a whole number"),
        ("attention_scale", "1", "here: attention_scale='1': must be a number"),
        ("norm", None, "here: norm=None: must be text"),
        ("rotary", 4, r"here\.rotary: must be an object"),
        ("rotary", {"pairing": "half"}, r"here\.rotary: key 'base' is missing"),
        ("width", 4, "here: unknown key 'width'"),
    ],
)
def test_a_saved_value_of_another_type_is_refused(key, value, message):
    saved = dataclasses.asdict(LAYER) | {key: value}
    with pytest.raises(InputError, match=message):
        from_dict(LayerConfig, saved, place="here")
