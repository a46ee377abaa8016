"""Scaled dot-product attention with several heads, grouped or not."""

from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import QueryKeyNorm, RotaryConfig
from jax_transformer.errors import InputError
from jax_transformer.layers.dropout import Dropout
from jax_transformer.layers.fusion import materialize
from jax_transformer.layers.linear import Linear
from jax_transformer.layers.mask import check_boolean
from jax_transformer.layers.normalization import RMSNorm
from jax_transformer.layers.rotary import RotaryPositionalEncoding

Implementation = Literal["auto", "einsum", "fused", "by head"]


@runtime_checkable
class KeyValueStore(Protocol):
    """Keys and values of earlier calls (see `decoding.cache`): K heads of them, never repeated for
    the queries that share one, and keys already turned by their positions."""

    def update(
        self, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Append the new ones and return all."""
        ...

    def read(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """All, as they are."""
        ...


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
    need_weights: bool = True,
    dropout: Dropout | None = None,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
    """`softmax(cap(scale Q K^T) + bias) V`, and the weights before dropout where they are needed.

    Query head n reads key-value head `n // G`, `G = N / K` (Ainslie et al. 2023): keys and values
    are never repeated in memory. `scale` is `1 / sqrt(H)` by default, `cap(x) = soft_cap
    tanh(x / soft_cap)` (none by default). Scores and softmax are in float32 or wider. A query
    that may attend to nothing gives zeros, forwards and backwards (the lecture document gives NaN
    there). Source: Vaswani et al. 2017, section 3.2.1; lecture section 4.6.

    `einsum` is written out here, and so is `by head` for one token of one row; `fused` is
    `jax.nn.dot_product_attention`, without weights, soft cap, dropout and float64. `auto` is the
    latter where it can be, but on a CPU `einsum`.

    Raises:
        InputError: a mask of numbers, query heads that key-value heads do not divide, or a
            `fused` that cannot be.
    """
    if mask is not None:
        check_boolean(mask)
    if query.shape[2] % key.shape[2]:
        raise InputError(
            f"{query.shape[2]} query heads and {key.shape[2]} key-value heads: each of these "
            f"serves equally many of those"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if dropout is not None and (dropout_key is None or dropout.rate == 0.0):
        dropout = None
    obstacle = fused_obstacle(query, soft_cap, need_weights, dropout)
    if implementation == "fused" and obstacle:
        raise InputError(f"implementation='fused' with {obstacle}: use 'einsum' or 'auto'")
    if implementation == "auto":
        implementation = "einsum" if obstacle or jax.default_backend() == "cpu" else "fused"

    if implementation == "fused":
        return fused_attention(query, key, value, mask, bias, scale), None
    by_head = implementation == "by head"
    scores = (scores_by_head if by_head else attention_scores)(query, key) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = softmax(scores)
    dropped = weights if dropout is None else dropout(weights, dropout_key)
    out = (values_by_head if by_head else weighted_values)(dropped.astype(value.dtype), value)
    return out, weights if need_weights else None


def fused_obstacle(
    query: Float[Array, "B T N H"],
    soft_cap: float | None,
    need_weights: bool,
    dropout: Dropout | None,
) -> str | None:
    """What `jax.nn.dot_product_attention` has no answer to, if anything."""
    if need_weights:
        return "need_weights=True"
    if soft_cap is not None:
        return f"soft_cap={soft_cap}"
    if dropout is not None:
        return f"dropout of {dropout.rate}"
    if query.dtype == jnp.float64:
        return "float64 (its softmax is in float32)"
    return None


def fused_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "#B #N #T #S"] | None,
    bias: Float[Array, "#B #N #T #S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """`jax.nn.dot_product_attention`, but zeros where it gives the mean of all values: for queries
    that may attend to nothing."""
    if bias is not None:  # Widened so that its derivative adds up in float32.
        bias = bias.astype(jnp.promote_types(query.dtype, jnp.float32))
    out = jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale)
    if mask is None:
        return out
    seen = mask.any(axis=-1, keepdims=True).swapaxes(1, 2)
    return jnp.where(seen, out, 0.0)


def attention_scores(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"]
) -> Float[Array, "B N T S"]:
    """`Q K^T` in float32 or wider; the G queries of one key head are more rows of one product."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, heads, width = query.shape
    if heads == key.shape[2]:
        return jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=wide)
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=wide)
    return scores.reshape(batch, heads, length, key.shape[1])


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B S K H"]
) -> Float[Array, "B T N H"]:
    """The sums of values; the G queries of one value head are more rows of one product."""
    batch, heads, length, size = weights.shape
    if heads == value.shape[2]:
        return jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    if length == 1:  # A cache's own order of axes: XLA's for the other form is half as fast.
        rows = weights.reshape(batch, value.shape[2], -1, size)
        return jnp.matmul(rows, value.swapaxes(1, 2)).reshape(batch, 1, heads, -1)
    grouped = weights.reshape(batch, value.shape[2], -1, length, size)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", grouped, value)
    return out.reshape(batch, length, heads, value.shape[-1])


def cached_implementation(query: Float[Array, "B T N H"]) -> Implementation:
    """What reads a cache fastest."""
    alone = query.shape[:2] == (1, 1) and jax.default_backend() == "cpu"
    return "by head" if alone else "auto"


def scores_by_head(
    query: Float[Array, "1 1 N H"], key: Float[Array, "1 S K H"]
) -> Float[Array, "1 N 1 S"]:
    """`attention_scores` of one token of one row, a product for each key head: XLA's CPU compiler
    reads a cache twice as fast so as in a batched product."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    groups = query.reshape(key.shape[2], -1, query.shape[-1])
    scores = [
        jnp.matmul(queries, key[0, :, head].T, preferred_element_type=wide)
        for head, queries in enumerate(groups)
    ]
    return jnp.concatenate(scores)[None, :, None]


def values_by_head(
    weights: Float[Array, "1 N 1 S"], value: Float[Array, "1 S K H"]
) -> Float[Array, "1 1 N H"]:
    """`weighted_values` of one token of one row, likewise."""
    groups = weights.reshape(value.shape[2], -1, weights.shape[-1])
    sums = [group @ value[0, :, head] for head, group in enumerate(groups)]
    return jnp.concatenate(sums)[None, None]


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
    """`Concat(head_1, ..., head_N) W_out`, `head_i = Attention(Q W_q,i, K W_k,j, V W_v,j)` with
    `j = i // G`.

    W_q is `[D, N H]`, W_k and W_v `[D, K H]`, W_out `[N H, D]`; head i is columns `[iH, (i+1)H)`.
    `num_kv_heads` K is N by default (multi-head), 1 is multi-query, between them grouped-query
    attention; `head_dim` H is D/N by default. With `query_key_norm` an RMSNorm goes over queries
    and keys: over each `head` (Qwen 3) or over the `full` projection (OLMo 2). `rotary` turns both
    by their positions after that. Source: Vaswani et al. 2017, section 3.2.2; Shazeer 2019; Ainslie
    et al. 2023; lecture section 4.6; names from the lecture document's `GroupedQueryAttention`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.1,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        scale: float | None = None,
        soft_cap: float | None = None,
        query_key_norm: QueryKeyNorm = "none",
        norm_epsilon: float = 1e-6,
        norm_unit_offset: bool = False,
        norm_scale_in_float32: bool = False,
        rotary: RotaryConfig | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = d_model // num_heads if head_dim is None else head_dim
        self.head_dim = width
        self.scale = scale
        self.soft_cap = soft_cap
        self.query_key_norm = query_key_norm
        self.q_proj = Linear(d_model, num_heads * width, bias=qkv_bias, rngs=rngs)
        self.k_proj = Linear(d_model, kv_heads * width, bias=qkv_bias and key_bias, rngs=rngs)
        self.v_proj = Linear(d_model, kv_heads * width, bias=qkv_bias, rngs=rngs)
        self.out_proj = Linear(num_heads * width, d_model, bias=out_bias, rngs=rngs)
        self.q_norm, self.k_norm = (
            None
            if query_key_norm == "none"
            else RMSNorm(
                width if query_key_norm == "head" else heads * width,
                norm_epsilon,
                norm_unit_offset,
                norm_scale_in_float32,
            )
            for heads in (num_heads, kv_heads)
        )
        self.rotary = None if rotary is None else RotaryPositionalEncoding(width, rotary)
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"] | None,
        value: Float[Array, "B S D"] | None,
        mask: Bool[Array, "#B #N #T _"] | None = None,
        bias: Float[Array, "#B #N #T _"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        *,
        cache: KeyValueStore | None = None,
        need_weights: bool = True,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T _"] | None]:
        """Output, and attention weights where they are needed.

        With a `cache` the projected keys and values join those already there, and the query
        attends to all; `key=None` reads the cache as it is. Mask, bias and weights are as wide as
        the keys attended to. `positions` (default 0, 1, ...) are read by rotary attention only,
        whose keys sit where its queries do.
        """
        q = self.split_heads(self.q_proj(query), self.q_norm)
        if key is None or value is None:
            if cache is None:
                raise TypeError("key and value may be None only where a cache holds theirs")
            k, v = cache.read()
        else:
            k, v = self.project_key_value(key, value)
            if self.rotary is not None:
                q, k = self.rotary(q, k, positions)
            if cache is not None:
                k, v = cache.update(k, v)
        out, weights = dot_product_attention(
            q,
            k,
            v,
            mask,
            bias,
            scale=self.scale,
            soft_cap=self.soft_cap,
            implementation="auto" if cache is None else cached_implementation(q),
            need_weights=need_weights,
            dropout=self.dropout,
            dropout_key=dropout_key,
        )
        return self.out_proj(out.reshape(*query.shape[:2], -1)), weights

    def project_key_value(
        self, key: Float[Array, "B S D"], value: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """The keys and values of every head, before their positions turn them."""
        return self.split_heads(self.k_proj(key), self.k_norm), self.split_heads(self.v_proj(value))

    def split_heads(
        self, x: Float[Array, "B T _"], norm: RMSNorm | None = None
    ) -> Float[Array, "B T _ H"]:
        """`[B, T, N H] -> [B, T, N, H]`, normed before or after as `query_key_norm` says."""
        if norm is not None and self.query_key_norm == "full":
            x = norm(x)
        heads = x.reshape(*x.shape[:2], -1, self.head_dim)
        return norm(heads) if norm is not None and self.query_key_norm == "head" else heads
