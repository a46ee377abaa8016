"""Clipping, Adam and AdamW in optax, every constant set as in PyTorch and the lecture document."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jax_transformer.layers.stack import is_layer_list

CLIP_EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm; optax's own clipping adds nothing,
and its result differs by 1e-6 / norm in every step that clips."""


class ClipState(NamedTuple):
    """The norm of the last gradients before clipping."""

    gradient_norm: Float[Array, ""]


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`g * min(1, max_norm / (|g| + 1e-6))`, |g| over all leaves, kept in the state.

    The definition of `torch.nn.utils.clip_grad_norm_`.
    """

    def init(params: optax.Params) -> ClipState:
        del params
        return ClipState(jnp.zeros((), jnp.result_type(float)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ClipState]:
        del state, params
        norm = optax.global_norm(updates)
        factor = jnp.minimum(1.0, max_norm / (norm + CLIP_EPSILON))
        clipped = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), updates)
        return clipped, ClipState(norm.astype(jnp.result_type(float)))

    return optax.GradientTransformation(init, update)


def adam(
    schedule: optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.98,
    eps: float = 1e-9,
    max_norm: float = 1.0,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Clipping at `max_norm`, then Adam: `p -= lr (m_hat / (sqrt(v_hat) + eps) + decay p)`.

    Moments corrected for bias, eps outside the root and after the correction. The decay does not
    pass through the moments (AdamW) and falls on matrices alone, see `matrices`.
    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019, algorithm 2, with decay times rate as
    in PyTorch; constants of Vaswani et al. 2017, section 5.3.
    """
    decay = [optax.add_decayed_weights(weight_decay, mask=matrices)] if weight_decay else []
    return optax.chain(
        clip_by_global_norm(max_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=0.0),
        *decay,
        optax.scale_by_learning_rate(schedule),
    )


def moved_in(state: optax.OptState, first: Any, second: Any, updates: int) -> optax.OptState:
    """A fresh state of `adam` with the moments and the number of updates of another optimizer."""
    moved = optax.tree_utils.tree_set(state, mu=first, nu=second, count=np.int32(updates))
    # Every leaf by itself: a step that donates its state may be given none twice.
    return jax.tree.map(jnp.array, moved)


def matrices(params: Any, stacked: bool = False) -> Any:
    """Which leaves of a tree of parameters are matrices: kernels and tables, not biases or scales
    of norms, whose size says something by itself.

    By the dimensions that a leaf has in the canonical layout: those of stacked layers (a
    `layers` that is no list, see `layers.stack`) have one more.
    """
    if not isinstance(params, dict):
        return params.ndim - stacked >= 2
    return {
        name: matrices(child, stacked or (name == "layers" and not is_layer_list(child)))
        for name, child in params.items()
    }
