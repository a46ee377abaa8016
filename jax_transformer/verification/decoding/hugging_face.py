"""The way in which models of `transformers` decode with their own caches."""

import inspect
from typing import Any

import numpy as np

from jax_transformer.verification.capture import as_numpy
from jax_transformer.verification.decoding.task import Decoding, most_likely


def cached_transformers(model: Any, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
    """A model with its own cache; prompts of language models are padded on the left."""
    way = cached_language if decoding.source is None else cached_translator
    return way(model, decoding, tokens)


def cached_language(model: Any, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
    """A causal language model."""
    import torch

    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    written = torch.from_numpy(decoding.padded_prompts()).long()
    lengths = torch.tensor([len(prompt) for prompt in decoding.prompts])[:, None]
    attention = (torch.arange(decoding.width) >= decoding.width - lengths).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    keyword = cache_keyword(model)
    cache, found = None, []
    for step in range(decoding.count):
        options = {"position_ids": positions} if takes_positions else {}
        with torch.no_grad():
            result = model(
                input_ids=written,
                attention_mask=attention,
                use_cache=True,
                **{keyword: cache},
                **options,
            )
        cache = getattr(result, keyword)
        found.append(as_numpy(result.logits[:, -1]))
        token = most_likely(found[-1]) if tokens is None else tokens[:, step]
        written = torch.from_numpy(np.array(token)).long()[:, None]
        attention = torch.cat([attention, torch.ones_like(written)], dim=1)
        positions = positions[:, -1:] + 1
    return np.stack(found, axis=1)


def cache_keyword(model: Any) -> str:
    """What releases of `transformers` call the cache."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def cached_translator(model: Any, decoding: Decoding, tokens: np.ndarray | None) -> np.ndarray:
    """A model with an encoder."""
    import torch

    assert decoding.source is not None
    source = torch.from_numpy(decoding.source.tokens)
    if source.is_floating_point():
        source = source.to(model.dtype)
    options = encoder_inputs(source, torch.from_numpy(decoding.source.mask))
    written = torch.from_numpy(decoding.padded_prompts()).long()
    keyword = cache_keyword(model)
    found: list[np.ndarray] = []
    for step in range(decoding.count):
        with torch.no_grad():
            result = model(decoder_input_ids=written, use_cache=True, **options)
        options = {key: options[key] for key in ("attention_mask",) if key in options} | {
            "encoder_outputs": (result.encoder_last_hidden_state,),
            keyword: getattr(result, keyword),
        }
        found.append(as_numpy(result.logits[:, -1]))
        token = most_likely(found[-1]) if tokens is None else tokens[:, step]
        written = torch.from_numpy(np.array(token)).long()[:, None]
    return np.stack(found, axis=1)


def encoder_inputs(source: Any, mask: Any) -> dict[str, Any]:
    """Tokens and their mask, or features `[B, mels, frames]`, of which all are read."""
    if source.is_floating_point():
        return {"input_features": source.swapaxes(1, 2)}
    return {"input_ids": source.long(), "attention_mask": mask[:, 0, 0].long()}
