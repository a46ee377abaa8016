"""What must hold of families of encoders (see `harness`)."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_transformer.porting.families.base import read_config
from parity_tests.harness import QUICK
from parity_tests.porting.families.harness import (
    REAL,
    B,
    Example,
    T,
    float64,
    ported,
    positions,
    tokens,
)


def check_same_encoder(example: Example, last: int) -> None:
    """Float64 hidden states, pooled ones and logits to 1e-10, whatever of these there is, under
    padding on both sides, with token types and at the last positions."""
    model = example.model()
    offset = read_config(example.family, example.values).position_offset
    ids, places = tokens(example.config.vocab_size), positions(last)
    types = np.random.default_rng(1).integers(0, example.config.type_vocab_size, (B, T))
    with float64(example.build), torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(ids).long(),
            token_type_ids=torch.from_numpy(types).long(),
            position_ids=torch.from_numpy(places + offset).long(),
            attention_mask=torch.from_numpy(REAL.astype(np.int64)),
            output_hidden_states=True,
        )
    with jax.enable_x64(True):
        ours = ported(example, model)
        run = jax.jit(lambda *a: ours(*a), compiler_options=QUICK)
        found = run(*map(jnp.asarray, (ids, REAL[:, None, None], types.astype(np.int32), places)))
    check_close(example, "hidden", found.hidden, theirs.hidden_states[-1], REAL)
    pooled, logits = getattr(theirs, "pooler_output", None), getattr(theirs, "logits", None)
    assert (pooled is None) != (logits is None)
    check_close(example, "pooled", found.pooled, pooled, np.ones(B, bool))
    check_close(example, "logits", found.logits, logits, REAL)


def check_close(
    example: Example,
    name: str,
    ours: jax.Array | None,
    theirs: torch.Tensor | None,
    rows: np.ndarray,
) -> None:
    """Neither is there, or they are the same to 1e-10, and of order 1 to 10."""
    assert (ours is None) == (theirs is None), name
    if ours is None or theirs is None:
        return
    expected = theirs.numpy()[rows]
    assert 0.3 < expected.std() < 20, f"{example}: {name} of {expected.std():.3g}"
    error = np.linalg.norm(np.asarray(ours)[rows] - expected) / np.linalg.norm(expected)
    assert error < 1e-10, f"{example}: {name} off by {error:.3g}"
