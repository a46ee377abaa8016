"""Rotary positions, scales, groups of heads, masks and biases of attention."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_transformer.config import RotaryConfig
from jax_transformer.layers import attention as attention_layer
from jax_transformer.layers import rotary as rotary_layer
from jax_transformer.layers.attention import MultiHeadAttention
from jax_transformer.layers.position_bias import get_alibi_slopes
from jax_transformer.layers.rotary import RotaryPositionalEncoding
from jax_transformer.verification.diagnose import Remedy, Trial, Weights
from jax_transformer.verification.localize import FedCall

BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 1000.0, 5000000.0)


def rotary_pairing(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """The other pairs of features."""
    if (found := rotation(module)) is not None:
        other = "adjacent" if found.config.pairing == "half" else "half"
        what = {
            "adjacent": "query and key are rotated in adjacent pairs: the checkpoint is in Meta's "
            "order; port it with pairing=adjacent",
            "half": "query and key are rotated in half-split pairs: the checkpoint is in the order "
            "of transformers; port it with pairing=half",
        }[other]
        yield Remedy("rotary pairing", what, rotary(pairing=other))


def rotary_base(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """Another base."""
    if (found := rotation(module)) is not None:
        for base in BASES:
            if base != found.config.base:
                yield Remedy(
                    "rotary base",
                    f"the rotary base is {base:g}, not {found.config.base:g}: the "
                    f"reference's rope_theta was not read",
                    rotary(base=base),
                )


def rotary_scaling(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """No scaling, or a linear one."""
    if (found := rotation(module)) is None:
        return
    config = found.config
    if config.scaling != "none":
        yield Remedy(
            "rotary scaling",
            f"frequencies are not scaled: the reference ignores scaling={config.scaling!r}",
            lambda trial: set_rotary(trial, unscaled(config)),
        )
    for factor in (2.0, 4.0, 8.0, 16.0, 32.0, 0.5):
        if config.scaling in ("none", "linear") and factor != config.factor:
            yield Remedy(
                "rotary scaling",
                f"frequencies are divided by {factor:g}: the reference scales positions, read its "
                f"rope_scaling",
                lambda trial, factor=factor: set_rotary(
                    trial,
                    dataclasses.replace(unscaled(config), scaling="linear", factor=factor),
                ),
            )


def rotary_width(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """More or less of each head turns, or nothing."""
    if (found := rotation(module)) is None:
        return
    width = found.head_dim if found.config.width is None else found.config.width
    for other in sorted({found.head_dim // 4, found.head_dim // 2, found.head_dim}):
        if other != width and other and other % 2 == 0:
            yield Remedy(
                "rotary width",
                f"{other} of {found.head_dim} features of a head are rotated, not {width}: read "
                f"the reference's partial_rotary_factor",
                rotary(width=other),
            )
    yield Remedy(
        "no rotation",
        "queries and keys are not rotated: the reference has no rotary positions there",
        unrotated,
    )


def unrotated(trial: Trial) -> None:
    """Turn nothing."""
    trial.patches.append((rotary_layer, "apply_rotary", lambda x, cos, sin, pairing: x))


def rotary_offset(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """Positions that count from elsewhere: only absolute ones show it, or those of padded rows."""
    if rotation(module) is None:
        return
    yield Remedy(
        "padding counted",
        "positions count all tokens of a row, padding too: one side lacks position ids",
        lambda trial: set_positions(trial, None),
    )


def rotation(module: Any) -> RotaryPositionalEncoding | None:
    """What turns queries and keys: the module itself, or what an attention has."""
    if isinstance(module, MultiHeadAttention):
        return module.rotary
    return module if isinstance(module, RotaryPositionalEncoding) else None


def unscaled(config: RotaryConfig) -> RotaryConfig:
    """The same without a scaling."""
    return RotaryConfig(pairing=config.pairing, base=config.base, width=config.width)


def rotary(**changes: Any) -> Callable[[Trial], None]:
    """The change that gives the module another rotation."""

    def change(trial: Trial) -> None:
        found = rotation(trial.module)
        assert found is not None
        found.config = dataclasses.replace(found.config, **changes)

    return change


def set_rotary(trial: Trial, config: RotaryConfig) -> None:
    """Give the module that rotation."""
    found = rotation(trial.module)
    assert found is not None
    found.config = config


ARGUMENTS = {
    MultiHeadAttention: ("query", "key", "value", "mask", "bias", "positions"),
    RotaryPositionalEncoding: ("q", "k", "positions"),
}


def names_of(module: Any) -> tuple[str, ...]:
    """The arguments of a call in their order."""
    return next(names for cls, names in ARGUMENTS.items() if isinstance(module, cls))


def argument(trial: Trial, name: str) -> Any:
    """The argument of a call."""
    index = names_of(trial.module).index(name)
    return trial.args[index] if index < len(trial.args) else trial.kwargs.get(name)


def set_argument(trial: Trial, name: str, value: Any) -> None:
    """Call with another one."""
    index = names_of(trial.module).index(name)
    if index < len(trial.args):
        trial.args = (*trial.args[:index], value, *trial.args[index + 1 :])
    else:
        trial.kwargs[name] = value


def set_positions(trial: Trial, positions: Any) -> None:
    """Call with other positions."""
    set_argument(trial, "positions", positions)


def scale(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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


def key_value_groups(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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


def masks(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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


def position_bias(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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
    for kind, (sentence, value) in forms.items():
        yield Remedy(kind, sentence, lambda trial, value=value: set_argument(trial, "bias", value))


ENTRIES = (
    rotary_pairing,
    rotary_base,
    rotary_scaling,
    rotary_width,
    rotary_offset,
    scale,
    key_value_groups,
    masks,
    position_bias,
)
