"""What both models are given: inputs under which faults show."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jax_transformer.config import (
    IGNORED_LABEL,
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    ModelConfig,
)
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config

Arrays = tuple[np.ndarray | None, ...]

ROWS, LENGTH = 3, 16


class Batch(NamedTuple):
    """What one step of training reads."""

    inputs: Arrays
    labels: np.ndarray | None
    """`[B, T]`, the token after each, or `IGNORED_LABEL`; None: the loss needs none."""


def revealing_inputs(
    *configs: Config, rows: int = ROWS, seed: int = 0, unused: Collection[int] = ()
) -> tuple[Arrays, np.ndarray]:
    """What both models are given, and which tokens count.

    A full row that ends at the last position, one padded on the right, one on the left, further
    ones of two tokens; ids of the whole vocabulary, but for those `unused`, or normal numbers for
    features.

    Raises:
        InputError: an encoder alone.
    """
    length = min(LENGTH, *(config.max_len for config in configs))
    real = np.ones((rows, length), bool)
    real[1, length - length // 3 :] = False
    real[2, : length // 3] = False
    real[3:, 2:] = False
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    positions[0] += min(config.max_len for config in configs) - length
    positions = positions.astype(np.int32)
    padding = real[:, None, None]
    generator = np.random.default_rng(seed)

    def ids(field: str) -> np.ndarray:
        size = min(getattr(config, field) for config in configs)
        chosen = np.setdiff1d(np.arange(size, dtype=np.int32), list(unused))
        return generator.choice(chosen, (rows, length))

    if isinstance(configs[0], DecoderOnlyConfig):
        return (ids("vocab_size"), padding, positions), real
    if not isinstance(configs[0], ModelConfig | EncoderDecoderConfig):
        raise InputError(f"{type(configs[0]).__name__}: encoders alone are not compared")
    causal = padding & np.tril(np.ones((length, length), bool))
    audio = getattr(configs[0], "audio", None)
    if audio is None:
        tokens = ids("src_vocab_size"), ids("tgt_vocab_size")
        return (*tokens, padding, causal, positions, positions), real
    half = min(LENGTH, audio.max_len)
    features = generator.standard_normal((rows, 2 * half, audio.num_mel_bins))
    seen = np.ones((rows, 1, 1, half), bool)
    inputs = features.astype(np.float32), ids("tgt_vocab_size"), seen, causal, None, positions
    return inputs, real


def training_batches(
    *configs: Config, steps: int, unused: Collection[int] = ()
) -> tuple[Batch, ...]:
    """As many batches: rows as `revealing_inputs` has them, and a short one, each real token to be
    predicted from those before it.

    Args:
        configs: of both models.
        steps: the number of batches.
        unused: ids that no batch has.

    Raises:
        InputError: an encoder alone.
    """
    batches = []
    for step in range(steps):
        inputs, real = revealing_inputs(*configs, rows=ROWS + 1, seed=step + 1, unused=unused)
        written = inputs[0 if isinstance(configs[0], DecoderOnlyConfig) else 1]
        batches.append(Batch(inputs, next_tokens(written, real)))
    return tuple(batches)


def next_tokens(tokens: np.ndarray | None, real: np.ndarray) -> np.ndarray:
    """The token after each, where both are real."""
    assert tokens is not None
    labels = np.full_like(tokens, IGNORED_LABEL)
    both = real[:, :-1] & real[:, 1:]
    labels[:, :-1][both] = tokens[:, 1:][both]
    return labels
