"""Faults of attention: scales, caps, groups of heads, masks."""

from collections.abc import Iterator
from typing import Any

import torch

from parity_tests.planted_faults import plant
from parity_tests.planted_faults.fault import Fault
from parity_tests.planted_faults.models import D, T
from torch_reference.layers import attention


def attention_faults() -> Iterator[Fault]:
    first, second = "layers.0.self_attn", "layers.1.self_attn"
    encoder, cross = "encoder.layers.0.self_attn", "decoder.layers.1.cross_attn"
    for model, place, value in (
        ("llama", first, 1.0),
        ("gpt2", second, D**-0.5),
        ("gpt2, scale 1", first, None),
        ("document", cross, 1.0),
    ):
        yield Fault("attention scale", model, place, plant.setting(place, scale=value))
    for model, value in (("llama", 50.0), ("llama, soft cap", None)):
        yield Fault("attention soft cap", model, second, plant.setting(second, soft_cap=value))
    for place in (first, second):
        yield Fault("key-value groups", "llama", place, plant.forward(place, tiled_groups))
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    seen = torch.ones(T, T, dtype=torch.bool).tril
    distance = torch.arange(T)[:, None] - torch.arange(T)

    def keys(mask: torch.Tensor) -> torch.Tensor:
        return mask.any(dim=2, keepdim=True)

    masks = {
        "mask polarity": lambda mask: ~mask,
        "no mask": torch.ones_like,
        "not causal": lambda mask: keys(mask).expand(-1, -1, T, T),
        "padding ignored": lambda mask: causal[None, None],
        "own key hidden": lambda mask: mask & ~torch.eye(T, dtype=torch.bool),
        "next key seen": lambda mask: keys(mask) & seen(1),
        "mask axis": lambda mask: mask.swapaxes(-1, -2),
        "window": lambda mask: mask & (distance < 4),
    }
    for kind, change in masks.items():
        for model, place in (("llama", first), ("gpt2", second)):
            yield Fault(kind, model, place, plant.argument(place, 3, "mask", change))
    forms = {
        "mask as factor": (masked_to_zero, None),
        "mask after softmax": (None, masked_weights),
        "mask as number": (lambda scores, mask: scores + mask.to(scores), None),
    }
    for kind, form in forms.items():
        for model, place in (("llama", second), ("gpt2", first)):
            yield Fault(kind, model, place, plant.forward(place, masked_by(*form)))
    for model, place in (("document", encoder), ("document, pre", "encoder.layers.1.self_attn")):
        only = plant.argument(place, 3, "mask", lambda mask: mask & causal)
        yield Fault("causal", model, place, only)
    lost = plant.argument(cross, 3, "mask", torch.ones_like)
    yield Fault("no mask", "document", cross, lost)
    for model, place in (("llama, window", first), ("llama, window", second)):
        wider = plant.argument(place, 3, "mask", lambda mask: keys(mask) & causal & (distance < 5))
        yield Fault("window", model, place, wider)


def tiled_groups(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any = None,
    bias: Any = None,
    positions: Any = None,
    **options: Any,
) -> Any:
    q = module.split_heads(module.q_proj(query), module.q_norm)
    k, v = module.project_key_value(key, value)
    q, k = module.rotary(q, k, positions)
    times = q.shape[2] // k.shape[2]
    k, v = k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1)
    out, weights = attention.dot_product_attention(q, k, v, mask, **options)
    return module.out_proj(out.reshape(*query.shape[:2], -1)), weights


def masked_to_zero(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, scores, 0.0)


def masked_weights(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return weights * mask


def masked_by(of_scores: Any, of_weights: Any) -> Any:
    """An attention that masks in another way."""

    def forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any = None,
        bias: Any = None,
        positions: Any = None,
        **options: Any,
    ) -> Any:
        q = module.split_heads(module.q_proj(query), module.q_norm)
        k, v = module.project_key_value(key, value)
        if module.rotary is not None:
            q, k = module.rotary(q, k, positions)
        times = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
        scores = torch.einsum("BTNH,BSNH->BNTS", q, k) * q.shape[-1] ** -0.5
        weights = (scores if of_scores is None else of_scores(scores, mask)).softmax(-1)
        weights = weights if of_weights is None else of_weights(weights, mask)
        out = torch.einsum("BNTS,BSNH->BTNH", weights, v)
        return module.out_proj(out.reshape(*query.shape[:2], -1)), weights

    return forward


FAULTS = (*attention_faults(),)
