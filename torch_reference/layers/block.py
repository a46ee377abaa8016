"""Encoder and decoder layers, with the norm after each sublayer or before it."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from jax_transformer.config import Activation
from torch_reference.layers.attention import MultiHeadAttention
from torch_reference.layers.feedforward import FeedForward
from torch_reference.layers.normalization import LayerNorm


class EncoderLayer(nn.Module):
    """Post-norm: `x = norm1(x + dropout1(self_attn(x)))`, `x = norm2(x + dropout2(ffn(x)))`.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B S D"], src_mask: Bool[Tensor, "#B 1 #S S"] | None = None
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B N S S"]]:
        """Output and self-attention weights."""
        attn_out, attn_weights = self.self_attn(x, x, x, src_mask)
        x = self.norm1(x + self.dropout1(attn_out))

        ffn_out = self.ffn(x)
        x = self.norm2(x + self.dropout2(ffn_out))
        return x, attn_weights


class PreNormEncoderLayer(nn.Module):
    """Pre-norm: `x = x + dropout(self_attn(norm1(x)))`, `x = x + dropout(ffn(norm2(x)))`.

    Source: Xiong et al. 2020; lecture section 4.2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B S D"], src_mask: Bool[Tensor, "#B 1 #S S"] | None = None
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B N S S"]]:
        """Output and self-attention weights."""
        normed = self.norm1(x)
        attn_out, attn_weights = self.self_attn(normed, normed, normed, src_mask)
        x = x + self.dropout(attn_out)

        normed = self.norm2(x)
        ffn_out = self.ffn(normed)
        x = x + self.dropout(ffn_out)
        return x, attn_weights


class DecoderLayer(nn.Module):
    """Post-norm: causal self-attention, attention to the encoder's output, feed-forward.

    `x = norm1(x + dropout(self_attn(x)))`, `x = norm2(x + dropout(cross_attn(x, enc_output)))`,
    `x = norm3(x + dropout(ffn(x)))`. Source: Vaswani et al. 2017, section 3.1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm1 = LayerNorm(d_model)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm2 = LayerNorm(d_model)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation)
        self.norm3 = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"]]:
        """Output and cross-attention weights."""
        self_attn_out, _ = self.self_attn(x, x, x, tgt_mask)
        x = self.norm1(x + self.dropout(self_attn_out))

        cross_attn_out, cross_weights = self.cross_attn(x, enc_output, enc_output, src_mask)
        x = self.norm2(x + self.dropout(cross_attn_out))

        ffn_out = self.ffn(x)
        x = self.norm3(x + self.dropout(ffn_out))
        return x, cross_weights


class PreNormDecoderLayer(nn.Module):
    """Pre-norm: as `DecoderLayer`, each sublayer reading a normed x and adding to x as it is.

    The encoder's output is read as it comes (the encoder ends in a norm of its own).
    Source: Xiong et al. 2020; lecture section 4.2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm1 = LayerNorm(d_model)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm2 = LayerNorm(d_model)
        self.ffn = FeedForward(d_model, d_ff, dropout, activation)
        self.norm3 = LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"]]:
        """As `DecoderLayer.forward`."""
        normed = self.norm1(x)
        self_attn_out, _ = self.self_attn(normed, normed, normed, tgt_mask)
        x = x + self.dropout(self_attn_out)

        normed = self.norm2(x)
        cross_attn_out, cross_weights = self.cross_attn(normed, enc_output, enc_output, src_mask)
        x = x + self.dropout(cross_attn_out)

        normed = self.norm3(x)
        ffn_out = self.ffn(normed)
        x = x + self.dropout(ffn_out)
        return x, cross_weights
