"""Scaled dot-product attention with several heads."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torch_reference.layers.mask import check_boolean


def dot_product_attention(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S N H"],
    value: Float[Tensor, "B S N H"],
    mask: Bool[Tensor, "#B #N #T #S"] | None = None,
    *,
    dropout: nn.Module | None = None,
) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B N T S"]]:
    """`softmax(Q K^T / sqrt(H)) V`, and the weights before dropout.

    Scores and softmax are in float32 or wider. A query that may attend to nothing gives zeros,
    forwards and backwards (the lecture document gives NaN there). Source: Vaswani et al. 2017,
    section 3.2.1.

    Raises:
        InputError: a mask of numbers.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("btnh,bsnh->bnts", query.to(wide), key.to(wide))
    scores = scores * query.shape[-1] ** -0.5
    if mask is not None:
        check_boolean(mask)
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    dropped = weights if dropout is None else dropout(weights)
    return torch.einsum("bnts,bsnh->btnh", dropped.to(value.dtype), value), weights


class MultiHeadAttention(nn.Module):
    """`Concat(head_1, ..., head_N) W_out`, `head_i = Attention(Q W_q,i, K W_k,i, V W_v,i)`.

    The four projections are D wide with biases; head i is rows `[iH, (i+1)H)` of each.
    Source: Vaswani et al. 2017, section 3.2.2; names from the lecture document's
    `GroupedQueryAttention`.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Float[Tensor, "B T D"],
        key: Float[Tensor, "B S D"],
        value: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "#B #N #T #S"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"]]:
        """Output and attention weights."""
        q = self.split_heads(self.q_proj(query))
        k, v = self.project_key_value(key, value)
        out, weights = dot_product_attention(q, k, v, mask, dropout=self.dropout)
        return self.out_proj(out.reshape(query.shape)), weights

    def project_key_value(
        self, key: Float[Tensor, "B S D"], value: Float[Tensor, "B S D"]
    ) -> tuple[Float[Tensor, "B S N H"], Float[Tensor, "B S N H"]]:
        """The keys and values of every head."""
        return self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(value))

    def split_heads(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T N H"]:
        """`[B, T, D] -> [B, T, N, H]`."""
        return x.reshape(*x.shape[:2], self.num_heads, -1)
