"""Why a way of decoding gives other logits: known faults are applied to what a model without a
cache is given, until it gives the same.

A cache that is filled or read wrongly is a mask or positions that are wrong: a key that was
overwritten is one that no later token sees, a counter that is off by one are positions that are.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from flax import nnx

from jax_transformer.verification.compare import SAME_FUNCTION, relative_error
from jax_transformer.verification.decoding.remedies import Remedy, remedies
from jax_transformer.verification.decoding.task import Decoding, Layout
from jax_transformer.verification.decoding.ways import all_at_once
from jax_transformer.verification.diagnose import Diagnosis


def explain_decoding(
    model: nnx.Module,
    decoding: Decoding,
    tokens: np.ndarray,
    logits: Mapping[str, np.ndarray],
    base: np.ndarray,
) -> list[Diagnosis]:
    """The cause of each way whose logits differ from `base`, those of our side without a cache.

    Args:
        model: our side in float64.
        decoding: the prompts.
        tokens: chosen after them.
        logits: of each way.
        base: what they are to be.
    """
    layout = Layout.of(decoding, tokens)
    known = list(remedies(layout, decoding))
    tried: dict[tuple[int, ...], np.ndarray] = {}

    def under(chosen: tuple[int, ...]) -> np.ndarray:
        """The logits under remedies, computed once."""
        if chosen not in tried:
            changed = layout
            for index in chosen:
                changed = known[index].change(changed)
            tried[chosen] = all_at_once(model, decoding, changed)
        return tried[chosen]

    found = []
    for name, given in logits.items():
        error = relative_error(given, base)
        if error <= SAME_FUNCTION:
            continue
        kinds, sentence = (), "differs from an unknown cause"
        for chosen in candidates(known):
            if relative_error(given, under(chosen)) <= SAME_FUNCTION:
                kinds = tuple(known[index].kind for index in chosen)
                sentence = "agrees when " + " and ".join(known[i].sentence for i in chosen)
                break
        found.append(Diagnosis(name, where(given, base), error, kinds, sentence))
    return found


MOST_PAIRS = 400
"""Pairs of remedies that are tried."""


def candidates(known: list[Remedy]) -> Iterator[tuple[int, ...]]:
    """Each remedy alone, then two of different kinds."""
    yield from ((index,) for index in range(len(known)))
    pairs = itertools.combinations(range(len(known)), 2)
    different = (pair for pair in pairs if known[pair[0]].kind != known[pair[1]].kind)
    yield from itertools.islice(different, MOST_PAIRS)


def where(given: np.ndarray, base: np.ndarray) -> str:
    """The first token whose logits differ."""
    for step in range(base.shape[1]):
        for row in range(base.shape[0]):
            if not relative_error(given[row, step], base[row, step]) <= SAME_FUNCTION:
                return f"token {step + 1} after prompt {row + 1}"
    return "all tokens together"
