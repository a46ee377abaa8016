"""What both models are given: inputs under which faults show."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_transformer.config import (
    IGNORED_LABEL,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
)
from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config
from jax_transformer.verification.decoding.task import Source

Arrays = tuple[np.ndarray | None, ...]

ROWS, LENGTH = 3, 16


class Batch(NamedTuple):
    """What one step of training reads."""

    inputs: Arrays
    labels: np.ndarray | None
    """`[B, T]`, the token after each, or `IGNORED_LABEL`; None: the loss needs none."""


def revealing_inputs(
    *configs: Config,
    rows: int = ROWS,
    seed: int = 0,
    unused: Collection[int] = (),
    length: int = LENGTH,
    frames: int | None = None,
) -> tuple[Arrays, np.ndarray]:
    """What both models are given, and which tokens count.

    A full row that begins at the first position and ends at the last, with a gap between, one
    padded on the right, one on the left, further ones of two tokens; ids of the whole vocabulary,
    but for those `unused`, or normal numbers for features.

    Args:
        configs: of both models.
        rows: how many, at least 3.
        seed: of the draws.
        unused: ids that no row has.
        length: of a row of tokens, if the models have as many positions.
        frames: of a row of features; None: a few.
    """
    length = min(length, *(config.max_len for config in configs))
    real = np.ones((rows, length), bool)
    real[1, length - length // 3 :] = False
    real[2, : length // 3] = False
    real[3:, 2:] = False
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    positions[0, length // 2 :] += min(config.max_len for config in configs) - length
    positions = positions.astype(np.int32)
    padding = real[:, None, None]
    generator = np.random.default_rng(seed)

    def ids(field: str) -> np.ndarray:
        size = min(getattr(config, field) for config in configs)
        chosen = np.setdiff1d(np.arange(size, dtype=np.int32), list(unused))
        return generator.choice(chosen, (rows, length))

    if isinstance(configs[0], DecoderOnlyConfig):
        return (ids("vocab_size"), padding, positions), real
    if isinstance(configs[0], EncoderOnlyConfig):
        return (ids("vocab_size"), padding, ids("token_types"), positions), real
    causal = padding & np.tril(np.ones((length, length), bool))
    audio = getattr(configs[0], "audio", None)
    if audio is None:
        tokens = ids("src_vocab_size"), ids("tgt_vocab_size")
        return (*tokens, padding, causal, positions, positions), real
    half = min(LENGTH, audio.max_len) if frames is None else frames // 2
    features = generator.standard_normal((rows, 2 * half, audio.num_mel_bins))
    seen = np.ones((rows, 1, 1, half), bool)
    inputs = features.astype(np.float32), ids("tgt_vocab_size"), seen, causal, None, positions
    return inputs, real


def training_batches(
    *configs: Config,
    steps: int,
    unused: Collection[int] = (),
    draw: Callable[..., tuple[Arrays, np.ndarray]] = revealing_inputs,
) -> tuple[Batch, ...]:
    """As many batches: rows as `revealing_inputs` has them, and a short one, each real token to be
    predicted from those before it.

    Args:
        configs: of both models.
        steps: the number of batches.
        unused: ids that no batch has.
        draw: makes the inputs of a batch.

    Raises:
        InputError: an encoder alone.
    """
    if isinstance(configs[0], EncoderOnlyConfig):
        raise InputError("encoders alone are not trained here: leave out the steps of training")
    batches = []
    for step in range(steps):
        inputs, real = draw(*configs, rows=ROWS + 1, seed=step + 1, unused=unused)
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


def check_kind(ours: Config, theirs: Config, reference: Path) -> None:
    """Refuse to compare a translator with a language model, or what reads sound with what does not.

    Raises:
        InputError: two kinds.
    """
    if type(ours) is not type(theirs):
        raise InputError(
            f"{reference} holds a model of {type(theirs).__name__}, the other of "
            f"{type(ours).__name__}: give two of one kind"
        )
    sources = [getattr(config, "audio", None) for config in (ours, theirs)]
    if sources[0] != sources[1]:
        read = [str(source or "tokens") for source in sources]
        raise InputError(f"{reference} reads {read[1]}, the other {read[0]}: give two of one kind")


DECODED = 12
"""Tokens to choose after each prompt, where there is room for them."""

PROMPTS = (3, 12, 7)
"""Lengths of prompts that are continued together."""


def revealing_prompts(*configs: Config) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Prompts of different lengths for language models, and how many tokens are to follow.

    With what follows they stay within the positions of both models, and within the length from
    which on a rotation changes with the length of the text (`dynamic`, `longrope`): there a cache
    keeps keys as they were turned before.
    """
    room = min(longest(config) for config in configs)
    count = max(min(DECODED, room // 2), 1)
    generator = np.random.default_rng(0)
    size = min(getattr(config, "vocab_size") for config in configs)  # noqa: B009
    lengths = [max(min(length, room - count), 1) for length in PROMPTS]
    prompts = tuple(tuple(map(int, generator.integers(0, size, length))) for length in lengths)
    return prompts, count


def longest(config: Config) -> int:
    """Tokens that a language model decodes alike with a cache and without."""
    layers = (config.layer, config.local_layer) if isinstance(config, DecoderOnlyConfig) else ()
    rotations = [layer.rotary for layer in layers if layer is not None and layer.rotary is not None]
    lengths = [
        rotation.original_max_len
        for rotation in rotations
        if rotation.scaling in ("dynamic", "longrope") and rotation.original_max_len is not None
    ]
    return min(config.max_len, *lengths) if lengths else config.max_len


def revealing_source(
    *configs: Config, draw: Callable[..., tuple[Arrays, np.ndarray]] = revealing_inputs
) -> Source:
    """What an encoder reads: a full row, and two that are padded; of sound all is read."""
    (source, *_), _ = draw(*configs)
    assert source is not None
    mask = np.ones((ROWS, 1, 1, source.shape[1]), bool)
    if np.issubdtype(source.dtype, np.floating):
        return Source(tokens=source, mask=mask[..., ::2])
    for row in range(1, ROWS):
        mask[row, ..., source.shape[1] - row * source.shape[1] // 4 :] = False
    return Source(tokens=source, mask=mask)
