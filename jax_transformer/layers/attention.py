"""Scaled dot-product attention with several heads."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.fusion import materialize
from jax_transformer.layers.linear import Linear
from jax_transformer.layers.mask import check_boolean


@runtime_checkable
class KeyValueStore(Protocol):
    """Keys and values of earlier calls (see `decoding.cache`)."""

    def update(
        self, key: Float[Array, "B T N H"], value: Float[Array, "B T N H"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """Append the new ones and return all."""
        ...

    def read(self) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """All, as they are."""
        ...


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    dropout: Dropout | None = None,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """`softmax(Q K^T / sqrt(H)) V`, and the weights before dropout.

    Scores and softmax are in float32 or wider. A query that may attend to nothing gives zeros,
    forwards and backwards (the lecture document gives NaN there). Source: Vaswani et al. 2017,
    section 3.2.1.

    Raises:
        InputError: a mask of numbers.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=wide)
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        check_boolean(mask)
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = softmax(scores)
    dropped = weights if dropout is None else dropout(weights, dropout_key)
    return jnp.einsum("BNTS,BSNH->BTNH", dropped.astype(value.dtype), value), weights


@jax.custom_vjp
def softmax(scores: Float[Array, "B N T S"]) -> Float[Array, "B N T S"]:
    """`exp(x) / sum(exp(x))` over the last axis; a row of nothing but -inf gives zeros."""
    return _softmax_forward(scores)[0]


def _softmax_forward(scores: Float[Array, "B N T S"]) -> tuple[Array, Array]:
    highest = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(scores.dtype).min)
    exponentials = materialize(jnp.exp(scores - highest))
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = materialize(exponentials / jnp.where(total > 0, total, 1.0))
    return weights, weights


def _softmax_backward(
    weights: Float[Array, "B N T S"], gradient: Float[Array, "B N T S"]
) -> tuple[Array]:
    mean = materialize((weights * gradient).sum(axis=-1, keepdims=True))
    return (weights * (gradient - mean),)


softmax.defvjp(_softmax_forward, _softmax_backward)


class MultiHeadAttention(nnx.Module):
    """`Concat(head_1, ..., head_N) W_out`, `head_i = Attention(Q W_q,i, K W_k,i, V W_v,i)`.

    The four projections are D wide with biases; head i is columns `[iH, (i+1)H)` of each.
    Source: Vaswani et al. 2017, section 3.2.2; names from the lecture document's
    `GroupedQueryAttention`.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.q_proj = Linear(d_model, d_model, rngs=rngs)
        self.k_proj = Linear(d_model, d_model, rngs=rngs)
        self.v_proj = Linear(d_model, d_model, rngs=rngs)
        self.out_proj = Linear(d_model, d_model, rngs=rngs)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"] | None,
        value: Float[Array, "B S D"] | None,
        mask: Bool[Array, "#B #N #T _"] | None = None,
        *,
        cache: KeyValueStore | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T _"]]:
        """Output and attention weights.

        With a `cache` the projected keys and values join those already there, and the query
        attends to all; `key=None` reads the cache as it is. Mask and weights are as wide as
        the keys attended to.
        """
        q = self.split_heads(self.q_proj(query))
        if key is None or value is None:
            if cache is None:
                raise TypeError("key and value may be None only where a cache holds theirs")
            k, v = cache.read()
        else:
            k, v = self.project_key_value(key, value)
            if cache is not None:
                k, v = cache.update(k, v)
        out, weights = dot_product_attention(
            q, k, v, mask, dropout=self.dropout, dropout_key=dropout_key
        )
        return self.out_proj(out.reshape(query.shape)), weights

    def project_key_value(
        self, key: Float[Array, "B S D"], value: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """The keys and values of every head."""
        return self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(value))

    def split_heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """`[B, T, D] -> [B, T, N, H]`."""
        return x.reshape(*x.shape[:2], self.num_heads, -1)
