from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.families.roberta import FAMILY
from parity_tests.harness import QUICK
from parity_tests.porting.families.encoders import check_same_encoder
from parity_tests.porting.families.harness import (
    REAL,
    Example,
    check_way_back,
    float64,
    ported,
    positions,
    tokens,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 66, "type_vocab_size": 1,
}  # fmt: skip
NO_DEFAULT_LEFT: dict[str, Any] = {
    "hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 5, "pad_token_id": 4,
    "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.4,
    "max_position_embeddings": 69,
}  # fmt: skip


def example(name, build, config_class=RobertaConfig, **settings):
    config = config_class(architectures=[build.__name__], **SIZES | settings)
    return Example(name=name, family=FAMILY, build=build, config=config)


EXAMPLES = [
    example("masked tokens", RobertaForMaskedLM),
    example("masked tokens, no default left", RobertaForMaskedLM, **NO_DEFAULT_LEFT),
    example("bare", RobertaModel),
    example("XLM-RoBERTa", XLMRobertaForMaskedLM, XLMRobertaConfig),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_outputs_are_those_of_transformers(example):
    check_same_encoder(example, last=63)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_way_back_is_exact(example):
    check_way_back(example)


@pytest.mark.parametrize(
    "config", [RobertaConfig(), XLMRobertaConfig()], ids=lambda c: c.model_type
)
def test_defaults_are_those_of_the_class(config):
    written = config.to_dict()
    found = read_config(FAMILY, {"vocab_size": config.vocab_size})
    assert read_config(FAMILY, written) == found
    assert (found.position_offset, found.max_len) == (2, 510)


@pytest.mark.parametrize("example", EXAMPLES[:2], ids=str)
def test_positions_are_counted_over_tokens_that_are_not_padding(example):
    padding = example.config.pad_token_id
    ids = tokens(example.config.vocab_size)
    ids = np.where(ids == padding, padding + 1, ids)
    ids = np.where(REAL, ids, padding).astype(np.int32)
    model = example.model()
    with float64(example.build), torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(ids).long(),
            attention_mask=torch.from_numpy(REAL.astype(np.int64)),
        ).logits.numpy()
    with jax.enable_x64(True):
        ours = ported(example, model)
        run = jax.jit(lambda *a: ours(*a).logits, compiler_options=QUICK)
        places = positions(ids.shape[1] - 1)
        found = run(jnp.asarray(ids), jnp.asarray(REAL[:, None, None]), None, jnp.asarray(places))
    np.testing.assert_allclose(np.asarray(found)[REAL], theirs[REAL], rtol=0, atol=1e-9)


def test_positions_without_a_row_of_padding_are_refused():
    with pytest.raises(InputError, match="pad_token_id=None"):
        read_config(FAMILY, EXAMPLES[0].values | {"pad_token_id": None})
