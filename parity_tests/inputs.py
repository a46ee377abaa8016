"""The one batch that every case reads, and inputs under which faults show.

Four rows: full, padded on the right, padded on the left, and empty (all padding). The full row
sits at the end of the position table. All shapes are the same everywhere, so that the op-by-op
runs of one case compile little that another has not.
"""

import numpy as np

from jax_transformer.config import IGNORED_LABEL, PAD_ID

B, T, S, D, N, F, V = 4, 7, 9, 16, 4, 24, 13
MAX_LEN = 5000


def padding(length: int) -> np.ndarray:
    """True at the real tokens of the four rows, `[B, length]`."""
    real = np.ones((B, length), bool)
    real[1, length - 3 :] = False
    real[2, :2] = False
    real[3] = False
    return real


def positions(length: int) -> np.ndarray:
    """Counted from the first real token of each row; the full row's are the last of the table."""
    counted = np.maximum(np.cumsum(padding(length), axis=1) - 1, 0)
    counted[0] += MAX_LEN - length
    return counted.astype(np.int32)


SOURCE_MASK = padding(S)[:, None, None, :]
TARGET_MASK = padding(T)[:, None, None, :] & np.tril(np.ones((T, T), bool))
SOURCE_POSITIONS, TARGET_POSITIONS = positions(S), positions(T)


def tokens(length: int, seed: int) -> np.ndarray:
    """Ids of the whole vocabulary (specials occur as tokens too), padding where there is none."""
    ids = np.random.default_rng(seed).integers(0, V, (B, length))
    return np.where(padding(length), ids, PAD_ID).astype(np.int32)


SOURCE, TARGET = tokens(S, seed=1), tokens(T, seed=2)
LABELS = np.where(padding(T), tokens(T, seed=3), IGNORED_LABEL).astype(np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers, exact in float32."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)
