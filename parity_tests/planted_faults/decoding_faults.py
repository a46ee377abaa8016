"""Faults that show when tokens are chosen one after the other."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch

from jax_transformer.decoding import greedy, program
from jax_transformer.decoding.cache import KeyValueCache
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.encoder_decoder import Decoder
from jax_transformer.verification.compiled import Programs
from jax_transformer.verification.decoding import ways
from jax_transformer.verification.decoding.task import Decoding, Way, most_likely
from jax_transformer.verification.decoding.ways import CACHED, REFERENCE
from jax_transformer.verification.pair import Pair
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.plant import Plant


def ours(*patches: tuple[Any, str, Any]) -> Plant:
    """Other functions under the cache of our side: (owner, name, replacement)."""

    def way(model: Any, decoding: Decoding, tokens: Any) -> Any:
        with contextlib.ExitStack() as stack:
            # Not what was compiled without them.
            stack.enter_context(mock.patch.object(ways, "PROGRAMS", Programs()))
            for owner, name, replacement in patches:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            return ways.cached(model, decoding, tokens)

    return replaced("ours", CACHED, way)


def theirs(way: Way) -> Plant:
    """Another loop around the reference."""
    return replaced("theirs", REFERENCE, way)


def replaced(side: str, name: str, way: Way) -> Plant:
    def plant(pair: Pair) -> Pair:
        assert pair.decoding is not None
        changed = {side: getattr(pair.decoding, side) | {name: way}}
        return dataclasses.replace(pair, decoding=dataclasses.replace(pair.decoding, **changed))

    return plant


def one_by_one(change: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, str, Any]:
    """Other positions and another mask of tokens that are read one at a time."""
    original = DecoderOnly.step

    def step(self: Any, tokens: Any, caches: Any, mask: Any, positions: Any, *rest: Any) -> Any:
        if tokens.shape[1] == 1:
            positions, mask = change(positions, mask)
        return original(self, tokens, caches, mask, positions, *rest)

    return DecoderOnly, "step", step


def of_translation(change: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    """Other positions of the tokens that a decoder with an encoder reads."""
    original = Decoder.step

    def step(
        self: Any, tgt: Any, cache: Any, src_mask: Any, tgt_mask: Any, positions: Any, *rest: Any
    ) -> Any:
        return original(self, tgt, cache, src_mask, tgt_mask, change(positions), *rest)

    return Decoder, "step", step


def prompt_positions(
    self: Any, tokens: Any, caches: Any, mask: Any, positions: Any, *rest: Any
) -> Any:
    """Those of prompts count padding."""
    if tokens.shape[1] > 1:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return ORIGINAL_STEP(self, tokens, caches, mask, positions, *rest)


ORIGINAL_STEP = DecoderOnly.step
ORIGINAL_READ = program.read_prompts
ORIGINAL_CACHE = greedy.start_cache
ORIGINAL_SLOTS = program.seen_slots


def fewer_slots(*arguments: Any, slots: int, **options: Any) -> Any:
    return ORIGINAL_READ(*arguments, slots=slots - 3, **options)


def shorter_window(layer: Any, positions: Any, key_positions: Any) -> Any:
    if positions.shape[1] == 1:
        layer = dataclasses.replace(layer, window=3)
    return ORIGINAL_SLOTS(layer, positions, key_positions)


def cached_faults() -> Iterator[Fault]:
    def fault(kind: str, model: str, *patches: tuple[Any, str, Any]) -> Fault:
        return Fault(kind, model, CACHED, ours(*patches), task="decoding")

    higher = one_by_one(lambda positions, mask: (positions + 1, mask))
    yield fault("position under the cache", "llama", higher)
    yield fault("position under the cache", "gpt2", one_by_one(lambda p, m: (p - 1, m)))
    start = of_translation(lambda positions: jnp.where(positions > 0, positions + 1, 0))
    yield fault("position under the cache", "document", start)
    yield fault("cache length not added", "llama", one_by_one(lambda p, m: (0 * p, m)))
    yield fault("cache length not added", "document", of_translation(lambda p: 0 * p))
    yield fault("padded prompts", "gpt2", (DecoderOnly, "step", prompt_positions))
    previous = property(lambda cache: cache.length - 1)
    for model in ("llama", "gpt2"):
        yield fault("cache slot overwritten", model, (KeyValueCache, "next_slot", previous))
    yield fault("cache too short", "gpt2", (program, "read_prompts", fewer_slots))
    fewer = lambda decoder, output, size: ORIGINAL_CACHE(decoder, output, size - 2)  # noqa: E731
    yield fault("cache too short", "document", (ways, "start_cache", fewer))
    for model in ("llama", "gpt2, sinusoids"):
        own = one_by_one(lambda p, m: (p, m & ~(jnp.cumsum(m[..., ::-1], -1)[..., ::-1] == 1)))
        yield fault("own key not read", model, own)
    for model in ("llama", "gpt2"):
        yield fault("cache window", model, (program, "seen_slots", shorter_window))
    yield fault("unknown", "llama", one_by_one(lambda p, m: (2 * p, m)))


def reference_faults() -> Iterator[Fault]:
    def fault(kind: str, model: str, way: Way) -> Fault:
        return Fault(kind, model, REFERENCE, theirs(way), task="decoding")

    yield fault("padded prompts", "gpt2, sinusoids", padded(positions=lambda real, width: None))
    yield fault("padded prompts", "gpt2", padded(positions=counted_after))
    for model in ("llama", "gpt2"):
        yield fault("prompt padding seen", model, padded(mask=torch.ones_like))
    for model in ("document", "document, pre"):
        yield fault("start token", model, beginning(lambda prompt: (3, *prompt[1:])))
    yield fault("start token", "gpt2", beginning(lambda prompt: (0, *prompt[1:])))
    for model in ("llama", "gpt2"):
        shorter = beginning(lambda prompt: prompt[1:])
        yield fault("start token missing", model, shorter)
    for model in ("document", "document, tied"):
        yield fault("source padding seen", model, without_source_mask)
    yield fault("unknown", "gpt2", padded(mask=lambda real: real.flip(1)))


def counted_after(real: torch.Tensor, width: int) -> torch.Tensor:
    """Positions of prompts are right, those of later tokens are columns."""
    right = (real.cumsum(1) - 1).clamp(min=0)
    columns = torch.arange(real.shape[1]).expand_as(right)
    return torch.where(columns < width, right, columns)


def padded(
    mask: Callable[[torch.Tensor], torch.Tensor] = lambda real: real,
    positions: Callable[[torch.Tensor, int], Any] = lambda real, width: (real.cumsum(1) - 1).clamp(
        min=0
    ),
) -> Way:
    """All prompts together, padded on the left."""

    def way(model: Any, decoding: Decoding, tokens: Any) -> np.ndarray:
        lengths = torch.tensor([len(prompt) for prompt in decoding.prompts])[:, None]
        written = torch.from_numpy(decoding.padded_prompts())
        real = torch.arange(decoding.width) >= decoding.width - lengths
        found: list[np.ndarray] = []
        for step in range(decoding.count):
            with torch.no_grad():
                places = positions(real, decoding.width)
                logits = model(written, mask(real)[:, None, None], places)
            found.append(logits[:, -1].numpy())
            token = most_likely(found[-1]) if tokens is None else tokens[:, step]
            written = torch.cat([written, torch.from_numpy(np.array(token))[:, None]], 1)
            real = torch.cat([real, torch.ones_like(real[:, :1])], 1)
        return np.stack(found, 1)

    return way


def beginning(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Way:
    """Other prompts."""

    def way(model: Any, decoding: Decoding, tokens: Any) -> np.ndarray:
        prompts = tuple(map(change, decoding.prompts))
        other = dataclasses.replace(decoding, prompts=prompts)
        return RIGHT(model, other, tokens)

    return way


RIGHT = ways.row_by_row(lambda model, *inputs: model(*inputs))


def without_source_mask(model: Any, decoding: Decoding, tokens: Any) -> np.ndarray:
    assert decoding.source is not None
    source = dataclasses.replace(decoding.source, mask=np.ones_like(decoding.source.mask))
    return RIGHT(model, dataclasses.replace(decoding, source=source), tokens)


FAULTS = (*cached_faults(), *reference_faults())
