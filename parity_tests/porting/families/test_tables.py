"""What no logit shows: dropout, lengths, biases of keys; and what must not be otherwise."""

from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families import (
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
from jax_transformer.porting.families.base import get, read_config
from jax_transformer.porting.plan import convert
from parity_tests.porting.families import (
    test_bart,
    test_bert,
    test_bloom,
    test_gemma,
    test_gemma2,
    test_gemma3,
    test_gpt2,
    test_gpt_neox,
    test_gptj,
    test_llama,
    test_marian,
    test_mistral,
    test_mpt,
    test_olmo2,
    test_phi3,
    test_qwen2,
    test_qwen3,
    test_roberta,
    test_t5,
)
from parity_tests.porting.families.harness import skeleton, tensors_of

# The rate is that of what sublayers add; the length is of positions, rows of padding aside.
SETTINGS: tuple[tuple[Any, str, float, int], ...] = (
    (test_gpt2, "layer.dropout", 0.2, 64),
    (test_gptj, "layer.dropout", 0.2, 64),
    (test_gpt_neox, "layer.dropout", 0.3, 64),
    (test_bloom, "layer.dropout", 0.2, 77),
    (test_mpt, "layer.dropout", 0.0, 64),
    (test_bert, "layer.dropout", 0.2, 64),
    (test_roberta, "layer.dropout", 0.2, 64),
    (test_t5, "encoder.dropout", 0.3, 99),
    (test_t5, "decoder.dropout", 0.3, 99),
    (test_bart, "encoder.dropout", 0.2, 14),
    (test_bart, "decoder.dropout", 0.2, 14),
    (test_marian, "encoder.dropout", 0.2, 14),
    (test_marian, "decoder.dropout", 0.2, 14),
    (test_llama, "layer.dropout", 0.0, 64),
    (test_mistral, "layer.dropout", 0.0, 64),
    (test_qwen2, "layer.dropout", 0.0, 64),
    (test_qwen3, "layer.dropout", 0.0, 64),
    (test_gemma, "layer.dropout", 0.0, 64),
    (test_gemma2, "layer.dropout", 0.0, 64),
    (test_gemma3, "layer.dropout", 0.0, 64),
    (test_phi3, "layer.dropout", 0.0, 128),
    (test_olmo2, "layer.dropout", 0.0, 64),
)


def ident(value: Any) -> str:
    return value.__name__.rpartition("_")[2] if hasattr(value, "__name__") else str(value)


@pytest.mark.parametrize(("module", "name", "rate", "length"), SETTINGS, ids=ident)
def test_dropout_and_length_are_those_of_the_config(module, name, rate, length):
    example = module.EXAMPLES[1]
    config: Any = read_config(module.FAMILY, example.values)
    assert get(config, name) == rate
    assert config.max_len == length


@pytest.mark.parametrize(("module", "length"), [(test_bloom, 2048), (test_t5, 512)], ids=ident)
def test_lengths_that_the_class_does_not_know_are_those_of_the_published_models(module, length):
    config: Any = read_config(module.FAMILY, {})
    assert config.max_len == length


D = 24
KEYS = {
    "gpt2": (test_gpt2.EXAMPLES[0], {"h.1.attn.c_attn.bias": "layers.1.self_attn"}),
    "bloom": (test_bloom.EXAMPLES[0], {}),
    "bert": (test_bert.HEAD, {"encoder.layer.1.attention.self.key.bias": "layers.1.self_attn"}),
    "roberta": (
        test_roberta.EXAMPLES[0],
        {"encoder.layer.1.attention.self.key.bias": "layers.1.self_attn"},
    ),
    **{
        name: (
            module.EXAMPLES[0],
            {
                "encoder.layers.1.self_attn.k_proj.bias": "encoder.layers.1.self_attn",
                "decoder.layers.0.self_attn.k_proj.bias": "decoder.layers.0.self_attn",
                "decoder.layers.0.encoder_attn.k_proj.bias": "decoder.layers.0.cross_attn",
            },
        )
        for name, module in (("bart", test_bart), ("marian", test_marian))
    },
}
"""Where keys are not rotated softmax does not see their bias: it adds the same to every score."""


@pytest.mark.parametrize("name", KEYS)
def test_biases_of_keys_are_in_their_place(name):
    example, places = KEYS[name]
    config = read_config(example.family, example.values)
    tensors = tensors_of(example.model())
    shapes = {leaf: array.shape for leaf, array in flatten(skeleton(config)[1]).items()}
    leaves = convert(example.family.rules(config), tensors, shapes)
    if name == "bloom":  # q, k, v of each of four heads in turn
        bias = tensors["transformer.h.1.self_attention.query_key_value.bias"]
        expected = bias.reshape(4, 3, 6)[:, 1].reshape(D)
        np.testing.assert_array_equal(leaves["layers.1.self_attn.k_proj.bias"], expected)
    for source, target in places.items():
        (found,) = [array for each, array in tensors.items() if each.endswith(source)]
        expected = found[D : 2 * D] if name == "gpt2" else found
        np.testing.assert_array_equal(leaves[f"{target}.k_proj.bias"], expected)


ROTARY = (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, olmo2)
REFUSED: tuple[tuple[Any, str, Any], ...] = (
    *((module, "attention_dropout", 0.1) for module in ROTARY),
    *((module, "use_bidirectional_attention", True) for module in (gemma, gemma2, gemma3)),
    (phi3, "resid_pdrop", 0.1),
    (phi3, "mlp_bias", True),
    (phi3, "lm_head_bias", True),
)


@pytest.mark.parametrize(("module", "field", "value"), REFUSED, ids=ident)
def test_what_is_not_built_is_refused(module, field, value):
    with pytest.raises(InputError, match=f"{field}={value!r}: must be"):
        read_config(module.FAMILY, test_llama.SIZES | {field: value})
