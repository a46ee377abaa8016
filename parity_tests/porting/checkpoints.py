"""Small checkpoints as `transformers` writes them, with a tokenizer that goes with them."""

import functools
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from jax_transformer.porting.families import gpt2, llama
from parity_tests.porting.families.harness import Example

TEXT = ("the cat sat on the mat", "a dog ran to the café, the naïve cat ran too", "1234 mats")
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
VOCABULARY = 300


@functools.cache
def tokenizer() -> Any:
    """Byte-level BPE that puts `<s>` before a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def ids() -> Any:
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


LLAMA = Example(
    name="llama",
    family=llama.FAMILY,
    build=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=VOCABULARY + 4,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=3e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **ids(),
    ),
)

GPT2 = Example(
    name="gpt2",
    family=gpt2.FAMILY,
    build=GPT2LMHeadModel,
    config=GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_inner=40,
        n_positions=64,
        layer_norm_epsilon=3e-5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ids(),
    ),
)


def save(example: Example, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """The folder of `save_pretrained`, tokenizer included."""
    model: Any = example.model(dtype)
    model.save_pretrained(path, **options)
    tokenizer().save_pretrained(path)
    return path
