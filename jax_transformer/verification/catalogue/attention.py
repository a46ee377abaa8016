"""Scales, groups of heads, masks and biases of attention."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_transformer.layers import attention as attention_layer
from jax_transformer.layers.attention import MultiHeadAttention
from jax_transformer.layers.position_bias import get_alibi_slopes
from jax_transformer.verification.catalogue.calls import argument, set_argument
from jax_transformer.verification.diagnose import Evidence, Remedy, Trial
from jax_transformer.verification.localize import FedCall


def scale(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another factor on the scores, another cap."""
    if not isinstance(module, MultiHeadAttention):
        return
    width = module.head_dim
    d_model = np.shape(call.args[0])[-1]
    heads = module.q_proj.kernel.shape[1] // width
    now = width**-0.5 if module.scale is None else module.scale
    named = {
        f"1 / sqrt(H) = {width**-0.5:.4g}": width**-0.5,
        "1": 1.0,
        f"1 / sqrt(D) = {d_model**-0.5:.4g}": d_model**-0.5,
        f"1 / sqrt(D / N) = {(d_model / heads) ** -0.5:.4g}": (d_model / heads) ** -0.5,
        f"1 / H = {1 / width:.4g}": 1 / width,
        "half of ours": now / 2,
        "twice ours": now * 2,
    }
    for text, value in named.items():
        if not math.isclose(value, now):
            yield Remedy(
                "attention scale",
                f"scores are multiplied by {text}, not by {now:.4g}: set attention_scale",
                lambda trial, value=value: setattr(trial.module, "scale", value),
            )
    for cap in (None, 50.0, 30.0, 20.0):
        if cap != module.soft_cap:
            yield Remedy(
                "attention soft cap",
                f"the soft cap of scores is {cap}, not {module.soft_cap}: set attention_soft_cap",
                lambda trial, cap=cap: setattr(trial.module, "soft_cap", cap),
            )


def key_value_groups(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Key-value heads tiled (0, 1, 0, 1) where they are repeated (0, 0, 1, 1)."""
    if not isinstance(module, MultiHeadAttention):
        return
    heads = module.q_proj.kernel.shape[1] // module.head_dim
    groups = module.k_proj.kernel.shape[1] // module.head_dim
    if groups in (1, heads):
        return
    order = np.arange(heads).reshape(-1, groups).T.ravel()  # those of one group together

    def change(trial: Trial) -> None:
        original = attention_layer.dot_product_attention

        def tiled(
            query: Any, key: Any, value: Any, mask: Any = None, *rest: Any, **options: Any
        ) -> Any:
            out, weights = original(query[:, :, order], key, value, mask, *rest, **options)
            return out[:, :, np.argsort(order)], weights

        trial.patches.append((attention_layer, "dot_product_attention", tiled))

    yield Remedy(
        "key-value groups",
        "query head n reads key-value head n mod K: the reference tiles them (0, 1, 0, 1), repeat "
        "each (0, 0, 1, 1)",
        change,
    )


def masks(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another meaning of the mask."""
    trial = Trial(module, call.args, dict(call.kwargs))
    if not isinstance(module, MultiHeadAttention) or argument(trial, "mask") is None:
        return
    mask = argument(trial, "mask")
    length, size = np.shape(call.args[0])[1], mask.shape[-1]
    causal = jnp.tril(jnp.ones((length, size), bool), size - length)[None, None]
    padding = mask.any(axis=2, keepdims=True)  # keys that anyone sees
    forms = {
        "mask polarity": ("True means hidden: one side has the mask's polarity reversed", ~mask),
        "no mask": ("nothing is masked: the reference has lost the mask", jnp.ones_like(mask)),
        "not causal": (
            "queries see later keys: the reference lacks the causal mask",
            jnp.broadcast_to(padding, (*mask.shape[:2], length, size)),
        ),
        "causal": ("queries do not see later keys: only the reference is causal", mask & causal),
        "padding ignored": ("padded keys are seen: the reference ignores padding", causal),
        "own key hidden": (
            "queries do not see their own key: one mask is off by one",
            mask & ~jnp.eye(length, size, dtype=bool),
        ),
        "next key seen": (
            "queries see one key too many: one mask is off by one",
            padding & jnp.tril(jnp.ones((length, size), bool), size - length + 1)[None, None],
        ),
    }  # fmt: skip
    if mask.shape[-2] == mask.shape[-1]:
        swapped = mask.swapaxes(-1, -2)
        forms["mask axis"] = ("the mask's axes of queries and keys are exchanged", swapped)
    if length == size and mask.shape[-2] == 1:
        forms["mask axis"] = ("padding hides queries, not keys", mask.swapaxes(-1, -2))
    distance = jnp.arange(length)[:, None] + size - length - jnp.arange(size)
    for window in range(1, length):
        forms[f"window {window}"] = (
            f"queries see {window} keys: the reference has a sliding window of {window}",
            padding & (distance >= 0)[None, None] & (distance < window)[None, None],
        )
    for kind, (sentence, value) in forms.items():
        yield Remedy(
            "window" if kind.startswith("window") else kind,
            sentence,
            lambda trial, value=value: set_argument(trial, "mask", value),
        )


def mask_forms(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """What is done to the scores that are masked."""
    trial = Trial(module, call.args, dict(call.kwargs))
    if not isinstance(module, MultiHeadAttention) or argument(trial, "mask") is None:
        return

    def form(masked: Callable[[Any, Any], Any], weighed: Callable[[Any, Any], Any]) -> Any:
        def attention(
            query: Any, key: Any, value: Any, mask: Any, bias: Any = None, **options: Any
        ) -> Any:
            scale = options.get("scale") or query.shape[-1] ** -0.5
            scores = attention_layer.attention_scores(query, key) * scale
            if (cap := options.get("soft_cap")) is not None:
                scores = cap * jnp.tanh(scores / cap)
            scores = masked(scores if bias is None else scores + bias, mask)
            weights = weighed(attention_layer.softmax(scores), mask)
            return attention_layer.weighted_values(weights, value), weights

        return lambda trial: trial.patches.append(
            (attention_layer, "dot_product_attention", attention)
        )

    same = lambda values, mask: values  # noqa: E731
    yield Remedy(
        "mask as factor",
        "masked scores are 0, which softmax does not leave out: scores are multiplied by the mask, "
        "fill them with -inf",
        form(lambda scores, mask: jnp.where(mask, scores, 0.0), same),
    )
    yield Remedy(
        "mask after softmax",
        "weights are masked after the softmax, and do not add up to 1: mask the scores",
        form(same, lambda weights, mask: jnp.where(mask, weights, 0.0)),
    )
    yield Remedy(
        "mask as number",
        "the mask is added as 0 and 1: make it boolean, or 0 and -inf",
        form(lambda scores, mask: scores + mask, same),
    )


def position_bias(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another bias between positions."""
    trial = Trial(module, call.args, dict(call.kwargs))
    if not isinstance(module, MultiHeadAttention) or argument(trial, "bias") is None:
        return
    bias = argument(trial, "bias")
    heads = bias.shape[1]
    slopes = np.asarray(get_alibi_slopes(heads))
    plain = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    forms = {
        "position bias missing": ("the bias between positions is left out", jnp.zeros_like(bias)),
        "position bias sign": ("the bias has the other sign: farther keys weigh more", -bias),
        "ALiBi slopes": (
            "the slopes are one geometric series: those of the paper hold for a power of two of "
            "heads only",
            bias * jnp.asarray(plain / slopes)[None, :, None, None],
        ),
        "position bias heads": ("the bias of the heads is in reverse order", bias[:, ::-1]),
        "position bias axis": ("the bias has its axes exchanged", bias.swapaxes(-1, -2)),
    }
    for dtype in (jnp.bfloat16, jnp.float16):
        name = jnp.dtype(dtype).name
        forms[f"rounded position bias {name}"] = (
            f"the bias is in {name}, in which far positions are one: keep it in float32",
            bias.astype(dtype).astype(bias.dtype),
        )
    for kind, (sentence, value) in forms.items():
        yield Remedy(
            "rounded position bias" if kind.startswith("rounded") else kind,
            sentence,
            lambda trial, value=value: set_argument(trial, "bias", value),
        )


ENTRIES = (scale, key_value_groups, masks, mask_forms, position_bias)
