"""Norms, activations and biases."""

from collections.abc import Iterator
from typing import Any, get_args

from jax_transformer.config import Activation
from jax_transformer.layers.feedforward import FeedForward, GatedFeedForward
from jax_transformer.layers.linear import Linear, OutputProjection
from jax_transformer.layers.normalization import LayerNorm, RMSNorm
from jax_transformer.verification.diagnose import Remedy, Trial, Weights
from jax_transformer.verification.localize import FedCall

EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1.1920929e-07, 1e-3, 1e-4, 1e-7, 0.0)


def epsilon(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """Another epsilon in the norm."""
    if not isinstance(module, LayerNorm | RMSNorm):
        return
    for value in EPSILONS:
        if value != module.epsilon:
            yield Remedy(
                "norm epsilon",
                f"epsilon is {value:g}, not {module.epsilon:g}: the reference's config says so, "
                f"take it over",
                assign("epsilon", value),
            )


def norm_form(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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


def missing_bias(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
    """No bias on one side."""
    if isinstance(module, Linear | LayerNorm | OutputProjection) and module.bias is not None:
        yield Remedy(
            "missing bias",
            "its bias is left out: the reference has none, or has not loaded it",
            assign("bias", None),
        )


def activation(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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


def gate_order(module: Any, call: FedCall, weights: Weights) -> Iterator[Remedy]:
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
