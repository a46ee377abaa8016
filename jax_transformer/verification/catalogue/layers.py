"""Norms, activations and biases."""

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np

from jax_transformer.config import Activation
from jax_transformer.layers.feedforward import FeedForward, GatedFeedForward
from jax_transformer.layers.linear import Linear, OutputProjection
from jax_transformer.layers.normalization import LayerNorm, RMSNorm
from jax_transformer.verification.diagnose import Evidence, Remedy, Trial
from jax_transformer.verification.localize import FedCall
from jax_transformer.verification.solve import tidied


def epsilon(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another epsilon in the norm, solved for from what the reference gave."""
    if not isinstance(module, LayerNorm | RMSNorm) or evidence.output is None:
        return
    scale = np.asarray(module.scale[...], np.float64)
    # The scale and the mean may be another matter as well.
    for factor in (scale, scale + 1.0, scale - 1.0):
        for centred in (isinstance(module, LayerNorm), isinstance(module, RMSNorm)):
            value = solved_epsilon(module, call.args[0], evidence.output, factor, centred)
            if value is not None and value != module.epsilon:
                yield Remedy(
                    "norm epsilon",
                    f"epsilon is {value:.6g}, not {module.epsilon:g}: the reference's config says "
                    f"so, take it over",
                    assign("epsilon", value),
                )


def solved_epsilon(
    module: LayerNorm | RMSNorm, x: Any, output: np.ndarray, scale: np.ndarray, centred: bool
) -> float | None:
    """`1 / f^2 - mean(x^2)`, with the f by which `f x scale` is nearest to the output, from the row
    that says it most exactly: one of little variance."""
    x, y = np.asarray(x, np.float64), np.asarray(output, np.float64)
    if x.size != y.size or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    y = y.reshape(x.shape)
    bias = getattr(module, "bias", None)
    if bias is not None:
        y = y - np.asarray(bias[...], np.float64)
    x = x - x.mean(-1, keepdims=True) if centred else x
    scaled = x * scale
    size, both = (scaled * scaled).sum(-1), (scaled * y).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.square(size / both)
        certain = np.where(np.isfinite(inverse) & (both > 0), inverse, np.inf)
    best = np.unravel_index(np.argmin(certain), certain.shape)
    if not np.isfinite(certain[best]):
        return None
    value = tidied(
        float(inverse[best] - np.square(x[best]).mean()), 2.0**-48 * float(inverse[best])
    )
    return value if value >= 0 else None


def norm_form(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """RMSNorm by weight or by 1 + weight; the mean subtracted or not."""
    if isinstance(module, RMSNorm):
        now, then = ("1 + weight", "weight") if module.unit_offset else ("weight", "1 + weight")
        yield Remedy(
            "norm offset",
            f"the norm multiplies by {then}, not by {now}: set norm_unit_offset="
            f"{not module.unit_offset}",
            assign("unit_offset", not module.unit_offset),
        )
        yield Remedy(
            "norm kind",
            "the mean is subtracted: the reference has a LayerNorm, set norm='layer'",
            lambda trial: setattr(trial, "module", as_layer_norm(trial.module)),
        )
    if isinstance(module, LayerNorm):
        yield Remedy(
            "norm kind",
            "the mean is not subtracted: the reference has an RMSNorm, set norm='rms'",
            lambda trial: setattr(trial, "module", as_rms_norm(trial.module)),
        )


def as_layer_norm(norm: RMSNorm) -> LayerNorm:
    """The LayerNorm of the same scale, without a bias."""
    other = LayerNorm(norm.scale.shape[0], norm.epsilon, bias=False)
    other.scale = norm.scale
    return other


def as_rms_norm(norm: LayerNorm) -> RMSNorm:
    """The RMSNorm of the same scale."""
    other = RMSNorm(norm.scale.shape[0], norm.epsilon)
    other.scale = norm.scale
    return other


def missing_bias(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """No bias on one side."""
    if isinstance(module, Linear | LayerNorm | OutputProjection) and module.bias is not None:
        yield Remedy(
            "missing bias",
            "its bias is left out: the reference has none, or has not loaded it",
            assign("bias", None),
        )


def activation(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Another nonlinearity, or another form of it."""
    if not isinstance(module, FeedForward | GatedFeedForward):
        return
    for name in get_args(Activation):
        if name != module.activation:
            yield Remedy(
                "activation",
                f"the activation is {name}, not {module.activation}: map the reference's name "
                f"for it to {name}",
                assign("activation", name),
            )


def gate_order(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The gate and the linear branch exchanged after their projections."""
    if not isinstance(module, GatedFeedForward):
        return

    def change(trial: Trial) -> None:
        from jax_transformer.layers import feedforward

        original = feedforward.activate_gated
        trial.patches.append(
            (feedforward, "activate_gated", lambda gate, up, kind: original(up, gate, kind))
        )

    yield Remedy(
        "gate and up",
        "the activation is on the up projection: gate_proj and up_proj are exchanged",
        change,
    )


def assign(name: str, value: Any) -> Any:
    """The change that gives the module another value of a setting."""
    return lambda trial: setattr(trial.module, name, value)


ENTRIES = (epsilon, norm_form, missing_bias, activation, gate_order)
