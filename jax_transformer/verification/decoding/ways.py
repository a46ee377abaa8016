"""The ways in which the two libraries decode."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.decoding import greedy, program
from jax_transformer.decoding.cache import start_cache
from jax_transformer.models.parameters import split
from jax_transformer.verification.capture import as_numpy
from jax_transformer.verification.compiled import PROGRAMS
from jax_transformer.verification.decoding.task import Decoding, Layout, Way, most_likely

CACHED, UNCACHED = "ours, cached", "ours, uncached"
REFERENCE = "reference"


def cached(model: nnx.Module, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
    """The steps of `decoding.program`, or those of `decoding.greedy`."""
    graphdef, params, buffers = split(model)
    if decoding.source is None:
        lengths = np.array([len(prompt) for prompt in decoding.prompts], np.int32)
        begin = (decoding.padded_prompts(), lengths)
    else:
        columns = decoding.padded_prompts()
        begin = (as_array(decoding.source.tokens, params), decoding.source.mask, columns)
    size = decoding.width + decoding.count - 1
    read = read_prompts if decoding.source is None else read_source
    state, logits = PROGRAMS.run(read, (graphdef, size), params, buffers, *begin)
    found = [np.asarray(logits)]
    for step in range(decoding.count - 1):
        token = most_likely(found[-1]) if tokens is None else tokens[:, step]
        state, logits = PROGRAMS.run(read_token, (graphdef,), params, buffers, state, token)
        found.append(np.asarray(logits))
    return np.stack(found, axis=1)


def read_prompts(graphdef: nnx.GraphDef, size: int) -> Any:
    """What reads prompts, and gives the state of caches of `size` slots, and the logits of what
    follows."""

    def read(params: Any, buffers: Any, prompts: Any, lengths: Any) -> Any:
        model = nnx.merge(graphdef, params, buffers)
        rows = jnp.arange(len(prompts))
        return program.read_prompts(model, prompts, lengths, rows, slots=size)

    return read


def read_source(graphdef: nnx.GraphDef, size: int) -> Any:
    """Likewise of a model with an encoder."""

    def read(params: Any, buffers: Any, source: Any, mask: Any, prompts: Any) -> Any:
        model = nnx.merge(graphdef, params, buffers)
        caches = start_cache(model.decoder, model.encode(source, mask), size)
        for index in range(prompts.shape[1]):
            token = prompts[:, index : index + 1]
            logits = greedy.next_logits(model, token, jnp.int32(index), caches, mask)
        return (caches, mask, jnp.int32(prompts.shape[1])), logits

    return read


def read_token(graphdef: nnx.GraphDef) -> Any:
    """What reads one more token of each row, likewise."""

    def read(params: Any, buffers: Any, state: Any, token: Any) -> Any:
        model = nnx.merge(graphdef, params, buffers)
        if isinstance(state, program.GenerationState):
            state = dataclasses.replace(state, token=token, position=state.position + 1)
            return program.read_token(model, state)
        caches, mask, index = state
        logits = greedy.next_logits(model, token[:, None], index, caches, mask)
        return (caches, mask, index + 1), logits

    return read


def as_array(source: np.ndarray, params: Any) -> jax.Array:
    """Features in the dtype of the parameters."""
    floating = np.issubdtype(source.dtype, np.floating)
    return jnp.asarray(source, jax.tree.leaves(params)[0].dtype if floating else None)


def uncached(model: nnx.Module, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
    """All chosen tokens in one call."""
    if tokens is None:
        raise TypeError("this way is given its tokens: it does not lead")
    return all_at_once(model, decoding, Layout.of(decoding, tokens))


def all_at_once(model: nnx.Module, decoding: Decoding, layout: Layout) -> np.ndarray:
    """The logits `[B, n, V]` that one call gives."""
    graphdef, params, buffers = split(model)
    inputs: tuple[Any, ...] = (layout.tokens, layout.seen, layout.positions)
    if decoding.source is not None:
        inputs = (
            as_array(decoding.source.tokens, params),
            layout.tokens,
            layout.source_mask,
            layout.seen,
            None,
            layout.positions,
        )
    logits = PROGRAMS.run(whole_model, (graphdef,), params, buffers, inputs)
    return np.asarray(logits)[:, layout.width - 1 :]


def whole_model(graphdef: nnx.GraphDef) -> Any:
    """The model itself."""

    def run(params: Any, buffers: Any, inputs: Any) -> Any:
        model: Any = nnx.merge(graphdef, params, buffers)
        return model(*inputs)

    return run


def row_by_row(call: Callable[..., Any]) -> Way:
    """The PyTorch side without a cache, each row alone and without padding.

    Args:
        call: `torch_call` of a `Pair`.
    """

    def way(model: Any, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
        rows = []
        for row, prompt in enumerate(decoding.prompts):
            logits_of = functools.partial(logits_of_row, model, call, decoding, row)
            if tokens is not None:
                rows.append(logits_of([*prompt, *tokens[row, :-1]])[len(prompt) - 1 :])
                continue
            written, found = [*prompt], []
            for _ in range(decoding.count):
                found.append(logits_of(written)[-1])
                written.append(int(most_likely(found[-1])))
            rows.append(np.stack(found))
        return np.stack(rows)

    return way


def beginning_with(start_id: int, way: Way) -> Way:
    """A way in which all prompts begin with another token."""

    def other(model: Any, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
        prompts = tuple((start_id, *prompt[1:]) for prompt in decoding.prompts)
        return way(model, dataclasses.replace(decoding, prompts=prompts), tokens)

    return other


def logits_of_row(
    model: Any, call: Callable[..., Any], decoding: Decoding, row: int, tokens: list[int]
) -> np.ndarray:
    """What follows each token, `[T, V]`."""
    import torch

    written = torch.tensor([tokens], dtype=torch.int32)
    size = len(tokens)
    positions = torch.arange(size, dtype=torch.int32)[None]
    if decoding.source is None:
        inputs = (written, torch.ones(1, 1, 1, size, dtype=torch.bool), positions)
    else:
        source = torch.from_numpy(decoding.source.tokens[row : row + 1])
        if source.is_floating_point():
            source = source.to(next(model.parameters()).dtype)
        mask = torch.from_numpy(decoding.source.mask[row : row + 1])
        causal = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
        inputs = (source, written, mask, causal, None, positions)
    with torch.no_grad():
        return as_numpy(call(model, *inputs)[0])


OURS = {CACHED: cached, UNCACHED: uncached}
"""Those of the JAX side."""
