"""Llama in files of llama.cpp; that rows of real ones are in place is seen in test_real_weights."""

from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.families import llama_gguf, llama_meta
from jax_transformer.porting.families.base import read_config, write_config
from jax_transformer.porting.families.llama_gguf import values_of
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


def test_the_config_is_what_the_metadata_say():
    values = values_of(METADATA, {})
    config: Any = read_config(llama_gguf.FAMILY, values)
    assert config.tied
    assert write_config(llama_gguf.FAMILY, config, values) == values
    assert read_config(llama_gguf.FAMILY, write_config(llama_gguf.FAMILY, config)) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type='yarn': must be 'none'"),
        ({"llama.attention.key_length": 8}, "differ: must be one width of a head"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8: must be 0"),
        ({"llama.rope.scaling.factor": 2.0}, r"field 'llama\.rope\.scaling\.factor' is not known"),
    ],
)
def test_what_is_not_built_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        read_config(llama_gguf.FAMILY, values_of(METADATA | fields, {}))
