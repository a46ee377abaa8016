"""Prompts of different lengths as arrays of a few shapes, padded on the left."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer.errors import InputError

SHORTEST_BUCKET = 16
"""Prompts are padded to this length times a power of two."""


class PromptBatch(NamedTuple):
    """Prompts that are read in one call. The last token of each is in the last column."""

    tokens: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    """0 for a row that is only there to fill up the batch."""
    rows: Int[np.ndarray, " B"]
    """The place of each prompt among all."""


def bucket(length: int, shortest: int = SHORTEST_BUCKET) -> int:
    """The least `shortest * 2^n` that is not below `length`."""
    return shortest << max(-(-length // shortest) - 1, 0).bit_length()


def check_prompts(
    prompts: Sequence[Sequence[Any]], *, vocab_size: int, max_tokens: int, max_len: int
) -> None:
    """Refuse what the model cannot read or continue.

    Raises:
        InputError: no token in a prompt, an id outside the vocabulary, no token to generate, or
            more tokens in all than `max_len`.
    """
    if max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens}: must be at least 1")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InputError(f"prompt {row + 1} has no token: give at least one character")
        for place, token in enumerate(prompt):
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not whole or not 0 <= token < vocab_size:
                raise InputError(
                    f"prompt {row + 1}, token {place + 1} is {token!r}: must be a whole number "
                    f"from 0 to {vocab_size - 1}"
                )
        room = max_len - len(prompt)
        if max_tokens > room:
            fewer = f", or generate at most {room}" if room > 0 else ""
            raise InputError(
                f"prompt {row + 1} has {len(prompt)} tokens, with max_tokens={max_tokens} more "
                f"than the {max_len} of the model: shorten it{fewer}"
            )


def prompt_batches(prompts: Sequence[Sequence[int]], rows_per_batch: int) -> list[PromptBatch]:
    """All prompts, those of one bucket of lengths together, up to `rows_per_batch` at a time.

    The number of rows is a power of two, or `rows_per_batch`: prompts of length 0 fill it up.
    """
    widths = np.array([bucket(len(prompt)) for prompt in prompts], int)
    batches = []
    for width in np.unique(widths):
        places = np.flatnonzero(widths == width)
        for start in range(0, len(places), rows_per_batch):
            chosen = places[start : start + rows_per_batch]
            height = min(bucket(len(chosen), shortest=1), rows_per_batch)
            tokens = np.zeros((height, width), np.int32)
            lengths, rows = np.zeros((2, height), np.int32)
            for row, place in enumerate(chosen):
                tokens[row, width - len(prompts[place]) :] = prompts[place]
                lengths[row], rows[row] = len(prompts[place]), place
            batches.append(PromptBatch(tokens, lengths, rows))
    return batches
