"""A small Llama and its training checkpoints, as PyTorch saves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jax_transformer.config import IGNORED_LABEL
from jax_transformer.data.packing import PackedBatch
from jax_transformer.porting.families import llama
from parity_tests.porting.families.harness import Example

LLAMA = Example(
    name="llama",
    family=llama.FAMILY,
    build=LlamaForCausalLM,
    config=LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
)


def packed(seed: int) -> PackedBatch:
    """Whole rows of one document each."""
    tokens = np.random.default_rng(seed).integers(0, 19, (3, 9), dtype=np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((3, 1), IGNORED_LABEL, np.int32)], axis=1)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (3, 9))
    return PackedBatch(tokens, labels, positions, np.ones((3, 9), np.int32))


def save(path: Path, values: dict[str, Any] | None = None, **content: Any) -> Path:
    """A file of PyTorch in a new folder, with a `config.json` beside it."""
    path.parent.mkdir()
    (path.parent / "config.json").write_text(json.dumps(values or LLAMA.values))
    torch.save(content, path)
    return path


def trained(
    groups: Callable[[Any], Any], kind: Any = torch.optim.AdamW, **settings: Any
) -> tuple[Any, Any]:
    """The model in float32 and its optimizer after an update.

    Args:
        groups: makes what the optimizer is given of the model.
        kind: of optimizer.
        settings: its hyperparameters.
    """
    model: Any = LLAMA.model(torch.float32)
    optimizer = kind(groups(model), **({"lr": 0.1} | settings))
    model(torch.from_numpy(packed(0).tokens).long()).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def by_dimension(model: Any) -> list[dict[str, Any]]:
    """Groups of nameless parameters: matrices, and all else without weight decay."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
