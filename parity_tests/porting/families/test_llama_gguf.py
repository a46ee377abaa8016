"""Llama in files of llama.cpp; that rows of real ones are in place is seen in test_real_weights."""

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jax_transformer.errors import InputError
from jax_transformer.porting.families import llama_gguf, llama_meta
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.llama_gguf import values_of
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.identify import leaf_shapes
from jax_transformer.porting.plan import convert, make_plan_back, run

METADATA = {
    "general.architecture": "llama",
    "general.file_type": 3,
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 40,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 3e-5,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 6,
    "tokenizer.ggml.tokens": [str(number) for number in range(304)],
}

SCALED = {"llama.rope.scaling.factor": 2.0}
FREQUENCIES: Any = {
    "rope_freqs.weight": LazyTensor((3,), np.dtype(np.float32), lambda: np.float32([1, 2, 3]))
}


META = {
    "token_embd": "tok_embeddings",
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}


def test_rows_are_in_the_order_of_meta():
    config: Any = read_config(llama_gguf.FAMILY, values_of(METADATA, {"output.weight": None}))
    assert not config.tied
    assert config.layer.head_dim == 6
    assert config.vocab_size == 304
    rng = np.random.default_rng(0)
    leaves = {n: rng.standard_normal(shape) for n, shape in leaf_shapes(config).items()}
    meta, file = (
        run(make_plan_back(family.rules(config), leaves), leaves)
        for family in (llama_meta, llama_gguf)
    )
    assert len(file) == len(meta) == len(leaves)
    for name, tensor in file.items():
        for part, theirs in META.items():
            name = name.replace(part, theirs)
        np.testing.assert_array_equal(tensor, meta[name], err_msg=name)
    back = convert(llama_gguf.rules(config), file, leaf_shapes(config))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(back[name], leaf)


@pytest.mark.parametrize(
    ("more", "tensors"),
    [
        ({}, {}),
        (SCALED | {"llama.rope.scaling.type": "linear"}, {}),
        (
            SCALED
            | {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {},
        ),
        ({}, FREQUENCIES),
    ],
    ids=["no scaling", "linear", "yarn", "factors"],
)
def test_the_config_is_what_the_metadata_say(more, tensors):
    values = values_of(METADATA | more, tensors)
    config: Any = read_config(llama_gguf.FAMILY, values)
    assert config.tied
    assert write_config(llama_gguf.FAMILY, config, values) == values
    assert read_config(llama_gguf.FAMILY, write_config(llama_gguf.FAMILY, config)) == config


def test_factors_are_not_those_of_two_scalings():
    values = values_of(METADATA | SCALED, FREQUENCIES)
    with pytest.raises(InputError, match=r"rope_freqs\.weight with .*='linear': must be one or"):
        read_config(llama_gguf.FAMILY, values)


def test_factors_of_the_published_settings_are_llama3():
    parameters = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=64, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    given = np.float32(5e5 ** (-np.arange(32) / 32) / scaled.numpy())
    assert ((given > 1.001) & (given < 31)).sum() == 3
    found = llama_gguf.llama3_of(given.tolist(), 5e5)
    assert found is not None
    assert found["scaling"] == "llama3"
    assert (found["factor"], found["original_max_len"]) == (32.0, 8192)
    given[16] *= 1.001
    assert llama_gguf.llama3_of(given.tolist(), 5e5) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (SCALED | {"llama.rope.scaling.type": "longrope"}, "='longrope': must be none, linear or"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "='yarn' with .*factor=None: a scaled rotation needs",
        ),
        (SCALED | {"llama.rope.scaling.type": "none"}, "='none' with .*factor=2.0: a scaled"),
        (SCALED | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor' is not known"),
        ({"llama.attention.key_length": 8}, "differ: must be one width of a head"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8: must be 0"),
    ],
)
def test_what_is_not_built_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        read_config(llama_gguf.FAMILY, values_of(METADATA | fields, {}))
