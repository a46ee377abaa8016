"""The Transformer block: attention and feed-forward, with norms after, before, around or beside."""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import Activation, LayerConfig, NormPlacement
from jax_transformer.errors import InputError
from torch_reference.layers.attention import MultiHeadAttention
from torch_reference.layers.feedforward import make_feed_forward
from torch_reference.layers.normalization import LayerNorm, RMSNorm, make_norm


class Block(nn.Module):
    """Self-attention, attention to an encoder's output (with `cross_attention`), feed-forward.

    With f each of these sublayers, `placement` says where the norms sit:

    - `post`: `x = norm_i(x + dropout(f_i(x)))` (Vaswani et al. 2017, section 3.1);
    - `pre`: `x = x + dropout(f_i(norm_i(x)))` (Xiong et al. 2020; lecture section 4.2);
    - `output`: `x = x + dropout(norm_i(f_i(x)))` (OLMo team 2024, OLMo 2);
    - `sandwich`: `x = x + dropout(post_norm_i(f_i(norm_i(x))))` (Gemma 2);
    - `parallel`: `x + dropout(self_attn(norm1(x))) + dropout(ffn(norm1(x)))` (Wang and Komatsuzaki
      2021), or `ffn(norm2(x))` with `parallel_norms` 2 (Black et al. 2022).

    The encoder's output is read as it comes. Cross-attention knows no positions.

    Raises:
        InputError: `parallel` with cross-attention.
    """

    def __init__(self, config: LayerConfig, *, cross_attention: bool = False):
        if cross_attention and config.placement == "parallel":
            raise InputError(
                "placement='parallel' with cross-attention: that follows self-attention, choose "
                "another placement"
            )
        d_model, sandwich = config.d_model, config.placement == "sandwich"
        super().__init__()
        self.config = config
        self.self_attn = make_attention(config)
        if cross_attention:
            self.norm1 = make_norm(config, d_model)
            self.cross_attn = make_attention(config, cross=True)
            self.norm2 = make_norm(config, d_model)
            self.ffn = make_feed_forward(config)
            self.norm3 = make_norm(config, d_model)
        else:
            one = config.placement == "parallel" and config.parallel_norms == 1
            self.cross_attn = None
            self.ffn = make_feed_forward(config)
            self.norm1 = make_norm(config, d_model)
            self.norm2 = None if one else make_norm(config, d_model)
            self.norm3 = None
        self.post_norm1 = make_norm(config, d_model) if sandwich else None
        self.post_norm2 = make_norm(config, d_model) if sandwich else None
        self.post_norm3 = make_norm(config, d_model) if sandwich and cross_attention else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"] | None = None,
        self_mask: Bool[Tensor, "#B #N #T _"] | None = None,
        cross_mask: Bool[Tensor, "#B #N #T S"] | None = None,
        bias: Float[Tensor, "#B #N #T _"] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
        *,
        need_weights: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T _"] | None]:
        """Output, and the weights of the last attention where they are needed.

        The masks say all about who sees whom: a block adds no causality or window of its own.
        `bias` is added to the scores of self-attention.
        """
        inner = self.enter(x, self.norm1)
        attn_out, weights = self.self_attn(
            inner,
            inner,
            inner,
            self_mask,
            bias,
            positions,
            need_weights=need_weights and self.cross_attn is None,
        )
        if self.config.placement == "parallel":
            inner = inner if self.norm2 is None else self.norm2(x)
            ffn_out = self.ffn(inner)
            return x + self.dropout(attn_out) + self.dropout(ffn_out), weights
        x = self.leave(x, attn_out, self.norm1, self.post_norm1)

        if self.cross_attn is None:
            inner = self.enter(x, self.norm2)
            ffn_out = self.ffn(inner)
            return self.leave(x, ffn_out, self.norm2, self.post_norm2), weights

        inner = self.enter(x, self.norm2)
        attn_out, weights = self.cross_attn(
            inner,
            enc_output,
            enc_output,
            cross_mask,
            need_weights=need_weights,
        )
        x = self.leave(x, attn_out, self.norm2, self.post_norm2)

        inner = self.enter(x, self.norm3)
        ffn_out = self.ffn(inner)
        return self.leave(x, ffn_out, self.norm3, self.post_norm3), weights

    def enter(
        self, x: Float[Tensor, "B T D"], norm: LayerNorm | RMSNorm | None
    ) -> Float[Tensor, "B T D"]:
        """What a sublayer reads."""
        return x if norm is None or self.config.placement in ("post", "output") else norm(x)

    def leave(
        self,
        x: Float[Tensor, "B T D"],
        out: Float[Tensor, "B T D"],
        norm: LayerNorm | RMSNorm | None,
        post_norm: LayerNorm | RMSNorm | None,
    ) -> Float[Tensor, "B T D"]:
        """x after a sublayer that put out `out`."""
        post_norm = norm if self.config.placement == "output" else post_norm
        out = out if post_norm is None else post_norm(out)
        x = x + self.dropout(out)
        return norm(x) if norm is not None and self.config.placement == "post" else x


def make_attention(config: LayerConfig, cross: bool = False) -> MultiHeadAttention:
    """The attention of that configuration, `cross` without rotary positions."""
    return MultiHeadAttention(
        config.d_model,
        config.num_heads,
        config.dropout,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        key_bias=config.key_bias,
        out_bias=config.out_bias,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        query_key_norm=config.query_key_norm,
        norm_epsilon=config.norm_epsilon,
        norm_unit_offset=config.norm_unit_offset,
        norm_scale_in_float32=config.norm_scale_in_float32,
        rotary=None if cross else config.rotary,
    )


def document_config(
    d_model: int,
    num_heads: int,
    d_ff: int,
    dropout: float,
    activation: Activation,
    placement: NormPlacement,
    causal: bool,
) -> LayerConfig:
    """The block of one of the lecture document's layers."""
    return LayerConfig(
        d_model=d_model,
        num_heads=num_heads,
        d_ff=d_ff,
        dropout=dropout,
        activation=activation,
        placement=placement,
        causal=causal,
    )


class EncoderLayer(Block):
    """The lecture document's post-norm layer of an encoder."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        config = document_config(
            d_model, num_heads, d_ff, dropout, activation, "post", causal=False
        )
        super().__init__(config)

    def forward(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #S S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B N S S"] | None]:
        """Output and self-attention weights."""
        return super().forward(x, self_mask=src_mask, need_weights=True)


class PreNormEncoderLayer(Block):
    """The lecture document's pre-norm layer of an encoder."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "pre", causal=False)
        super().__init__(config)

    def forward(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #S S"] | None = None,
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B N S S"] | None]:
        """Output and self-attention weights."""
        return super().forward(x, self_mask=src_mask, need_weights=True)


class DecoderLayer(Block):
    """The lecture document's post-norm layer of a decoder, with cross-attention."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "post", causal=True)
        super().__init__(config, cross_attention=True)

    def forward(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"] | None,
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T _"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"] | None]:
        """Output and cross-attention weights."""
        return super().forward(
            x,
            enc_output,
            tgt_mask,
            src_mask,
            need_weights=True,
        )


class PreNormDecoderLayer(Block):
    """The lecture document's pre-norm layer of a decoder, with cross-attention."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "pre", causal=True)
        super().__init__(config, cross_attention=True)

    def forward(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"] | None,
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T _"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B N T S"] | None]:
        """Output and cross-attention weights."""
        return super().forward(
            x,
            enc_output,
            tgt_mask,
            src_mask,
            need_weights=True,
        )
