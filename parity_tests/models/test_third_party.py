"""Both frameworks against `transformers`: seven architectures, weights copied by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jax_transformer.config import (
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    LayerConfig,
    RotaryConfig,
)
from jax_transformer.models import decoder_only, encoder_only
from parity_tests.harness import QUICK, carry, to_numpy
from parity_tests.models import third_party
from torch_reference.models import decoder_only as reference_decoder
from torch_reference.models import encoder_only as reference_encoder

L, D, N, F, V, MAX_LEN = 2, 24, 6, 40, 31, 64
B, T = 3, 9

# A row at the last positions of a table, one padded on the right, one on the left.
NAMES = ("logits", "prediction_logits", "last_hidden_state", "pooler_output")
REAL = np.ones((B, T), bool)
REAL[1, 6:] = REAL[2, :4] = False
TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
TYPES = np.random.default_rng(1).integers(0, 3, (B, T)).astype(np.int32)


def positions(last: int) -> np.ndarray:
    """Counted from the first real token; the first row ends at `last`."""
    counted = np.maximum(np.cumsum(REAL, axis=1) - 1, 0)
    counted[0] += last - T + 1
    return counted.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A configuration of `transformers` and the same of ours."""

    name: str
    architecture: third_party.Architecture
    theirs: Any
    settings: dict[str, Any]
    ours: DecoderOnlyConfig | EncoderOnlyConfig
    last: int = MAX_LEN - 1
    """The highest position."""

    def __str__(self) -> str:
        return self.name


COMMON = {"vocab_size": V, "num_layers": L, "max_len": MAX_LEN}
WIDTHS = {"d_model": D, "num_heads": N, "causal": True}
LLAMA_LAYER = {
    **WIDTHS,
    "d_ff": F,
    "norm": "rms",
    "norm_epsilon": 1e-3,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "gated": True,
    "activation": "silu",
}
LLAMA_SETTINGS = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": MAX_LEN,
}
YARN = {"factor": 8.0, "original_max_len": 16, "beta_fast": 4.0, "beta_slow": 0.5}


def llama(name, settings, layer=(), rotary=(), *, scaling=(), last=MAX_LEN - 1, **model):
    """`settings` and `scaling` of theirs; `layer`, `rotary` and `model` of ours."""
    rope = {"rope_type": "default", "rope_theta": 500.0, **dict(scaling)}
    return Example(
        name=f"Llama: {name}",
        architecture=third_party.LLAMA,
        theirs=(transformers.LlamaConfig, transformers.LlamaForCausalLM),
        settings={**LLAMA_SETTINGS, **settings, "rope_parameters": rope},
        ours=DecoderOnlyConfig(
            **COMMON,
            **model,
            position="rotary",
            layer=LayerConfig(
                **{
                    **LLAMA_LAYER,
                    **dict(layer),
                    "rotary": RotaryConfig(pairing="half", base=500.0, **dict(rotary)),
                }
            ),
        ),
        last=last,
    )


LLAMAS = (
    llama("far positions", {"num_key_value_heads": N}, last=5000),
    llama(
        "grouped queries, wide heads, biases, tied",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        {
            "num_kv_heads": 2,
            "head_dim": 8,
            "qkv_bias": True,
            "out_bias": True,
            "ffn_bias": True,
            "activation": "gelu_tanh",
        },
        tied=True,
    ),
    llama(
        "one key-value head, linear scaling, ReLU",
        {"num_key_value_heads": 1, "hidden_act": "relu"},
        {"num_kv_heads": 1, "activation": "relu"},
        {"scaling": "linear", "factor": 3.0},
        scaling={"rope_type": "linear", "factor": 3.0},
    ),
    llama(
        "llama3 scaling, exact GELU",
        {"hidden_act": "gelu", "head_dim": 16},
        {"activation": "gelu", "head_dim": 16},
        {
            "scaling": "llama3",
            "factor": 8.0,
            "original_max_len": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    llama(
        "dynamic scaling",
        {},
        {},
        {"scaling": "dynamic", "factor": 2.0, "original_max_len": MAX_LEN},
        scaling={"rope_type": "dynamic", "factor": 2.0},
        last=3 * MAX_LEN,
    ),
    llama(
        "YaRN, gate of a sigmoid",
        {"hidden_act": "sigmoid", "head_dim": 16},
        {"activation": "sigmoid", "head_dim": 16},
        {"scaling": "yarn", **YARN},
        scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
        },
    ),
)

QWEN3 = Example(
    name="Qwen 3: norms of heads, sliding window",
    architecture=third_party.LLAMA,
    theirs=(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    settings={
        **LLAMA_SETTINGS,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    ours=DecoderOnlyConfig(
        **COMMON,
        position="rotary",
        layer=LayerConfig(
            **LLAMA_LAYER,
            num_kv_heads=3,
            head_dim=8,
            query_key_norm="head",
            window=3,
            rotary=RotaryConfig(pairing="half", base=1e6),
        ),
    ),
)


def gpt2(name, settings, layer=(), **model):
    base = {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": N, "n_positions": MAX_LEN}
    layer = {**WIDTHS, "d_ff": 4 * D, "activation": "gelu_tanh", **dict(layer)}
    model = {"tied": True, **model}
    return Example(
        name=f"GPT-2: {name}",
        architecture=third_party.GPT2,
        theirs=(transformers.GPT2Config, transformers.GPT2LMHeadModel),
        settings=base | settings,
        ours=DecoderOnlyConfig(**COMMON, **model, position="learned", layer=LayerConfig(**layer)),
    )


GPT2S = (
    gpt2("as published", {}),
    gpt2(
        "own head, unscaled scores, ReLU, inner width",
        {
            "tie_word_embeddings": False,
            "scale_attn_weights": False,
            "activation_function": "relu",
            "n_inner": F,
            "layer_norm_epsilon": 1e-2,
        },
        {"attention_scale": 1.0, "activation": "relu", "d_ff": F, "norm_epsilon": 1e-2},
        tied=False,
    ),
    gpt2(
        "quick GELU",
        {"activation_function": "quick_gelu"},
        {"activation": "quick_gelu"},
    ),
)

BLOOMS = tuple(
    Example(
        name=f"BLOOM of {heads} heads",
        architecture=third_party.BLOOM,
        theirs=(transformers.BloomConfig, transformers.BloomForCausalLM),
        settings={
            "vocab_size": V,
            "hidden_size": D,
            "n_layer": L,
            "n_head": heads,
            "layer_norm_epsilon": 1e-3,
        },
        ours=DecoderOnlyConfig(
            **COMMON,
            position="alibi",
            tied=True,
            embedding_norm=True,
            layer=LayerConfig(
                **{**WIDTHS, "num_heads": heads},
                d_ff=4 * D,
                norm_epsilon=1e-3,
                activation="gelu_tanh",
            ),
        ),
        last=5000,
    )
    for heads in (4, 6)
)

GPTJ = Example(
    name="GPT-J",
    architecture=third_party.GPTJ,
    theirs=(transformers.GPTJConfig, transformers.GPTJForCausalLM),
    settings={
        "vocab_size": V,
        "n_embd": D,
        "n_layer": L,
        "n_head": 3,
        "n_positions": MAX_LEN,
        "rotary_dim": 4,
        "layer_norm_epsilon": 1e-3,
    },
    ours=DecoderOnlyConfig(
        **COMMON,
        position="rotary",
        head_bias=True,
        layer=LayerConfig(
            **{**WIDTHS, "num_heads": 3},
            d_ff=4 * D,
            norm_epsilon=1e-3,
            placement="parallel",
            qkv_bias=False,
            out_bias=False,
            activation="gelu_tanh",
            rotary=RotaryConfig(pairing="adjacent", width=4),
        ),
    ),
)


def gpt_neox(name, settings, layer):
    return Example(
        name=f"GPT-NeoX: {name}",
        architecture=third_party.GPT_NEOX,
        theirs=(transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
        settings={
            "vocab_size": V,
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": L,
            "num_attention_heads": 3,
            "max_position_embeddings": MAX_LEN,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            **settings,
        },
        ours=DecoderOnlyConfig(
            **COMMON,
            position="rotary",
            layer=LayerConfig(
                **{**WIDTHS, "num_heads": 3, **layer},
                d_ff=F,
                rotary=RotaryConfig(pairing="half", base=100.0, width=4),
            ),
        ),
    )


NEOXS = (
    gpt_neox("parallel", {}, {"placement": "parallel", "parallel_norms": 2}),
    gpt_neox(
        "one after the other, without biases",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
        {"qkv_bias": False, "out_bias": False, "activation": "gelu_tanh"},
    ),
)

BERT = Example(
    name="BERT",
    architecture=third_party.BERT,
    theirs=(transformers.BertConfig, transformers.BertForPreTraining),
    settings={
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "max_position_embeddings": MAX_LEN,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-3,
        "hidden_act": "relu",
    },
    ours=EncoderOnlyConfig(
        **COMMON,
        position="learned",
        token_types=3,
        head_activation="relu",
        layer=LayerConfig(
            **{**WIDTHS, "causal": False},
            d_ff=F,
            norm_epsilon=1e-3,
            placement="post",
            activation="relu",
        ),
    ),
)

DECODERS = (*LLAMAS, QWEN3, *GPT2S, *BLOOMS, GPTJ, *NEOXS)


def make_theirs(example):
    """Their model, and its weights under our names."""
    config, model = example.theirs
    theirs = third_party.make_model(model, config(**example.settings))
    heads = example.ours.layer.num_heads
    return theirs, example.architecture.weights(theirs, L, heads)


def make_ours(example, weights, reference_class, jax_class):
    """The two models with those weights, as functions of arrays."""
    reference = reference_class(example.ours).double().eval()
    reference.load_state_dict(weights, strict=True)
    skeleton = nnx.eval_shape(lambda: jax_class(example.ours, rngs=nnx.Rngs(0)))
    with jax.enable_x64(True):
        model = carry(reference, skeleton, "", jnp.float64)
        compiled = jax.jit(lambda *inputs: model(*inputs), compiler_options=QUICK)

    def run_torch(*inputs):
        with torch.no_grad():
            return reference(*map(torch.from_numpy, inputs))

    def run_jax(*inputs):
        with jax.enable_x64(True):
            return compiled(*inputs)

    return run_torch, run_jax


def run_theirs(model, **inputs):
    """The outputs of each row by itself, one behind the other: with the dynamic scaling theirs
    depend on the longest row of a batch."""
    inputs |= {"input_ids": TOKENS, "attention_mask": REAL}
    tensors = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    with torch.no_grad(), third_party.float64():
        rows = [
            model(**{name: tensor[row : row + 1] for name, tensor in tensors.items()})
            for row in range(B)
        ]
    return {name: torch.cat([row[name] for row in rows]) for name in NAMES if name in rows[0]}


def assert_close(found, expected):
    """To 1e-10, wherever there is a token."""
    found, expected = to_numpy(found), expected.numpy()
    assert found.dtype == expected.dtype == np.float64
    if found.ndim == 3:
        found, expected = found[REAL], expected[REAL]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("example", DECODERS, ids=str)
def test_logits_are_those_of_transformers(example):
    theirs, weights = make_theirs(example)
    if example.ours.tied:
        weights["output_proj.weight"] = weights["embedding.weight"]
    places = positions(example.last)
    given = {} if example.architecture is third_party.BLOOM else {"position_ids": places}
    expected = run_theirs(theirs, **given)["logits"]
    assert 1 < expected.std() < 10
    models = make_ours(example, weights, reference_decoder.DecoderOnly, decoder_only.DecoderOnly)
    for run in models:
        assert_close(run(TOKENS, REAL[:, None, None], places), expected)


def test_hidden_states_pooled_rows_and_masked_tokens_are_those_of_bert():
    theirs, weights = make_theirs(BERT)
    weights = {name: w for name, w in weights.items() if not name.startswith("next_sentence")}
    weights["token_head.output_proj.weight"] = weights["embedding.weight"]
    places = positions(BERT.last)
    inputs = {"token_type_ids": TYPES, "position_ids": places}
    expected = run_theirs(theirs.bert, **inputs)
    logits = run_theirs(theirs, **inputs)["prediction_logits"]
    assert 1 < logits.std() < 10
    models = make_ours(BERT, weights, reference_encoder.EncoderOnly, encoder_only.EncoderOnly)
    for run in models:
        found = run(TOKENS, REAL[:, None, None], TYPES, places)
        assert_close(found.hidden, expected["last_hidden_state"])
        # The left-padded row's first token is padding, and theirs is what it is.
        assert_close(found.pooled[:2], expected["pooler_output"][:2])
        assert_close(found.logits, logits)
