"""What both sides are to continue, and the ways in which they do."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Way = Callable[[Any, "Decoding", np.ndarray | None], np.ndarray]
"""`way(model, decoding, tokens)`: the logits `[B, n, V]` of each of n tokens after the prompts, of
a model of either framework in the dtype that it has. `tokens` `[B, n]` are what is chosen there,
whatever the logits say; None, for the way that leads: the most likely ones (`most_likely`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What an encoder reads."""

    tokens: np.ndarray
    """`[B, S]`, or features `[B, frames, mels]`."""
    mask: np.ndarray
    """`[B, 1, 1, S]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Prompts, and how they are continued. A decoder with an encoder has its start token as prompt,
    and those of all rows are equally long."""

    prompts: tuple[tuple[int, ...], ...]
    count: int
    """Tokens to choose after each prompt."""
    ours: Mapping[str, Way]
    """Of the JAX side, by name."""
    theirs: Mapping[str, Way]
    """Of the PyTorch side. The first one leads: all others are given the tokens that it chooses."""
    source: Source | None = None
    """None: a language model."""
    start_ids: tuple[int, ...] = ()
    """What a prompt might begin with instead."""

    @property
    def width(self) -> int:
        """Columns of the longest prompt."""
        return max(map(len, self.prompts))

    def padded_prompts(self) -> np.ndarray:
        """`[B, P]`, zeros on the left."""
        found = np.zeros((len(self.prompts), self.width), np.int32)
        for row, prompt in enumerate(self.prompts):
            found[row, self.width - len(prompt) :] = prompt
        return found


@dataclasses.dataclass(frozen=True)
class Layout:
    """Prompts and what was chosen, as a model without a cache is given it at once."""

    tokens: np.ndarray
    """`[B, T]`; prompts are padded on the left, and the last token chosen is left out: what it
    makes likely is not asked."""
    seen: np.ndarray
    """`[B, 1, T, T]`: which tokens each may attend to."""
    positions: np.ndarray
    """`[B, T]`."""
    width: int
    """Columns of prompts."""
    padding: np.ndarray
    """`[B, 1]`: how many of them are padding."""
    source_mask: np.ndarray | None
    """`[B, 1, 1, S]`."""

    @classmethod
    def of(cls, decoding: Decoding, tokens: np.ndarray) -> "Layout":
        """As it has to be."""
        written = np.concatenate([decoding.padded_prompts(), tokens[:, :-1]], axis=1)
        columns = np.arange(written.shape[1])
        lengths = np.array([len(prompt) for prompt in decoding.prompts])[:, None]
        padding = decoding.width - lengths
        real = columns >= padding
        causal = columns[:, None] >= columns
        return cls(
            tokens=written,
            seen=real[:, None, None] & causal,
            positions=np.maximum(columns - padding, 0).astype(np.int32),
            width=decoding.width,
            padding=padding,
            source_mask=None if decoding.source is None else decoding.source.mask,
        )


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Of equal ones the lowest id."""
    return logits.argmax(-1).astype(np.int32)
