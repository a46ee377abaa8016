"""Scaled dot-product attention with several heads, grouped or not."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import QueryKeyNorm, RotaryConfig
from jax_transformer.errors import InputError
from torch_reference.layers.mask import check_boolean
from torch_reference.layers.normalization import RMSNorm
from torch_reference.layers.rotary import RotaryPositionalEncoding

Implementation = Literal["auto", "einsum", "fused"]


def dot_product_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S K H"],
    value: Float[Tensor, "B S K H"],
    mask: Bool[Tensor, "#B #N #T #S"] | None = None,
    bias: Float[Tensor, "#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
    need_weights: bool = True,
    dropout: nn.Module | None = None,
) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B N T S"] | None]:
    """`softmax(cap(scale Q K^T) + bias) V`, and the weights before dropout where they are needed.

    Query head n reads key-value head `n // G`, `G = N / K` (Ainslie et al. 2023). `scale` is
    `1 / sqrt(H)` by default, `cap(x) = soft_cap tanh(x / soft_cap)` (none by default). Scores and
    softmax are in float32 or wider. A query that may attend to nothing gives zeros, forwards and
    backwards (the lecture document gives NaN there). Source: Vaswani et al. 2017, section 3.2.1;
    lecture section 4.6.

    `einsum` is written out here; `fused` is PyTorch's `scaled_dot_product_attention`, without
    weights, soft cap and dropout. `auto` is the latter where it can be.

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
    if isinstance(dropout, nn.Dropout) and (not dropout.training or dropout.p == 0.0):
        dropout = None
    obstacle = fused_obstacle(soft_cap, need_weights, dropout)
    if implementation == "fused" and obstacle:
        raise InputError(f"implementation='fused' with {obstacle}: use 'einsum' or 'auto'")
    if implementation == "auto":
        implementation = "einsum" if obstacle else "fused"

    if implementation == "fused":
        return fused_attention(query, key, value, mask, bias, scale), None
    scores = attention_scores(query, key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    dropped = weights if dropout is None else dropout(weights)
    out = weighted_values(dropped.to(value.dtype), value)
    return out, weights if need_weights else None


def fused_obstacle(
    soft_cap: float | None, need_weights: bool, dropout: nn.Module | None
) -> str | None:
    """What `scaled_dot_product_attention` has no answer to, if anything."""
    if need_weights:
        return "need_weights=True"
    if soft_cap is not None:
        return f"soft_cap={soft_cap}"
    if dropout is not None:
        return "dropout"
    return None


def fused_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S K H"],
    value: Float[Tensor, "B S K H"],
    mask: Bool[Tensor, "#B #N #T #S"] | None,
    bias: Float[Tensor, "#B #N #T #S"] | None,
    scale: float,
) -> Float[Tensor, "B T N H"]:
    """`scaled_dot_product_attention`, with zeros for queries that may attend to nothing whatever
    kernel it takes."""
    unseen, added = None, mask
    if mask is not None:
        unseen = ~mask.any(dim=-1, keepdim=True)
        added = mask | unseen
    if bias is not None:
        added = bias.to(query.dtype)
        if mask is not None:
            added = added.masked_fill(~mask, torch.finfo(query.dtype).min)
    out = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=added,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    if unseen is not None:
        out = out.masked_fill(unseen, 0)
    return out.transpose(1, 2)


def attention_scores(
    query: Float[Tensor, "B T N H"], key: Float[Tensor, "B S K H"]
) -> Float[Tensor, "B N T S"]:
    """`Q K^T` in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, length, heads, width = query.shape
    if heads == key.shape[2]:
        return torch.einsum("btnh,bsnh->bnts", query.to(wide), key.to(wide))
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    scores = torch.einsum("btkgh,bskh->bkgts", grouped.to(wide), key.to(wide))
    return scores.reshape(batch, heads, length, key.shape[1])


def weighted_values(
    weights: Float[Tensor, "B N T S"], value: Float[Tensor, "B S K H"]
) -> Float[Tensor, "B T N H"]:
    """The sums of values."""
    batch, heads, length, size = weights.shape
    if heads == value.shape[2]:
        return torch.einsum("bnts,bsnh->btnh", weights, value)
    grouped = weights.reshape(batch, value.shape[2], -1, length, size)
    out = torch.einsum("bkgts,bskh->btkgh", grouped, value)
    return out.reshape(batch, length, heads, value.shape[-1])


class MultiHeadAttention(nn.Module):
    """`Concat(head_1, ..., head_N) W_out`, `head_i = Attention(Q W_q,i, K W_k,j, V W_v,j)` with
    `j = i // G`.

    W_q is `[N H, D]`, W_k and W_v `[K H, D]`, W_out `[D, N H]`; head i is rows `[iH, (i+1)H)`.
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
    ):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = d_model // num_heads if head_dim is None else head_dim
        self.head_dim = width
        self.scale = scale
        self.soft_cap = soft_cap
        self.query_key_norm: QueryKeyNorm = query_key_norm
        self.q_proj = nn.Linear(d_model, num_heads * width, bias=qkv_bias)
        self.k_proj = nn.Linear(d_model, kv_heads * width, bias=qkv_bias and key_bias)
        self.v_proj = nn.Linear(d_model, kv_heads * width, bias=qkv_bias)
        self.out_proj = nn.Linear(num_heads * width, d_model, bias=out_bias)
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
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Float[Tensor, "B T D"],
        key: Float[Tensor, "B S D"],
        value: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "#B #N #T #S"] | None = None,
        bias: Float[Tensor, "#B #N #T #S"] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
        *,
        need_weights: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"] | None]:
        """Output, and attention weights where they are needed.

        `positions` (default 0, 1, ...) are read by rotary attention only, whose keys sit where its
        queries do.
        """
        q = self.split_heads(self.q_proj(query), self.q_norm)
        k, v = self.project_key_value(key, value)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        out, weights = dot_product_attention(
            q,
            k,
            v,
            mask,
            bias,
            scale=self.scale,
            soft_cap=self.soft_cap,
            need_weights=need_weights,
            dropout=self.dropout,
        )
        return self.out_proj(out.reshape(*query.shape[:2], -1)), weights

    def project_key_value(
        self, key: Float[Tensor, "B S D"], value: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S K H"], Float[Tensor, "B S K H"]]:
        """The keys and values of every head, before their positions turn them."""
        return self.split_heads(self.k_proj(key), self.k_norm), self.split_heads(self.v_proj(value))

    def split_heads(
        self, x: Float[Tensor, "B T _"], norm: nn.Module | None = None
    ) -> Float[Tensor, "B T _ H"]:
        """`[B, T, N H] -> [B, T, N, H]`, normed before or after as `query_key_norm` says."""
        if norm is not None and self.query_key_norm == "full":
            x = norm(x)
        heads = x.reshape(*x.shape[:2], -1, self.head_dim)
        return norm(heads) if norm is not None and self.query_key_norm == "head" else heads
