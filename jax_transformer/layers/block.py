"""The Transformer block: attention and feed-forward, with norms after, before, around or beside."""

from typing import Protocol, runtime_checkable

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import Activation, LayerConfig, NormPlacement
from jax_transformer.errors import InputError
from jax_transformer.layers.attention import KeyValueStore, MultiHeadAttention
from jax_transformer.layers.dropout import Dropout, fold_keys
from jax_transformer.layers.feedforward import make_feed_forward
from jax_transformer.layers.normalization import LayerNorm, RMSNorm, make_norm


@runtime_checkable
class LayerStore(Protocol):
    """What a block with cross-attention remembers between calls (see `decoding.cache`)."""

    self_attn: KeyValueStore
    cross_attn: KeyValueStore


class Block(nnx.Module):
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

    def __init__(self, config: LayerConfig, *, cross_attention: bool = False, rngs: nnx.Rngs):
        if cross_attention and config.placement == "parallel":
            raise InputError(
                "placement='parallel' with cross-attention: that follows self-attention, choose "
                "another placement"
            )
        d_model, sandwich = config.d_model, config.placement == "sandwich"
        self.config = config
        self.self_attn = make_attention(config, rngs=rngs)
        if cross_attention:
            self.norm1 = make_norm(config, d_model)
            self.cross_attn = make_attention(config, cross=True, rngs=rngs)
            self.norm2 = make_norm(config, d_model)
            self.ffn = make_feed_forward(config, rngs=rngs)
            self.norm3 = make_norm(config, d_model)
        else:
            one = config.placement == "parallel" and config.parallel_norms == 1
            self.cross_attn = None
            self.ffn = make_feed_forward(config, rngs=rngs)
            self.norm1 = make_norm(config, d_model)
            self.norm2 = None if one else make_norm(config, d_model)
            self.norm3 = None
        self.post_norm1 = make_norm(config, d_model) if sandwich else None
        self.post_norm2 = make_norm(config, d_model) if sandwich else None
        self.post_norm3 = make_norm(config, d_model) if sandwich and cross_attention else None
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"] | None = None,
        self_mask: Bool[Array, "#B #N #T _"] | None = None,
        cross_mask: Bool[Array, "#B #N #T S"] | None = None,
        bias: Float[Array, "#B #N #T _"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        *,
        cache: KeyValueStore | LayerStore | None = None,
        need_weights: bool = False,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T _"] | None]:
        """Output, and the weights of the last attention where they are needed.

        The masks say all about who sees whom: a block adds no causality or window of its own.
        `bias` is added to the scores of self-attention. A `cache` holds the keys and values of
        self-attention, or in a `LayerStore` those of both; with it `enc_output` may be None.
        """
        keys = fold_keys(dropout_key, 6)
        self_cache = cache.self_attn if isinstance(cache, LayerStore) else cache
        inner = self.enter(x, self.norm1)
        attn_out, weights = self.self_attn(
            inner,
            inner,
            inner,
            self_mask,
            bias,
            positions,
            cache=self_cache,
            need_weights=need_weights and self.cross_attn is None,
            dropout_key=keys[0],
        )
        if self.config.placement == "parallel":
            inner = inner if self.norm2 is None else self.norm2(x)
            ffn_out = self.ffn(inner, dropout_key=keys[2])
            return x + self.dropout(attn_out, keys[1]) + self.dropout(ffn_out, keys[3]), weights
        x = self.leave(x, attn_out, self.norm1, self.post_norm1, keys[1])

        if self.cross_attn is None:
            inner = self.enter(x, self.norm2)
            ffn_out = self.ffn(inner, dropout_key=keys[2])
            return self.leave(x, ffn_out, self.norm2, self.post_norm2, keys[3]), weights

        inner = self.enter(x, self.norm2)
        attn_out, weights = self.cross_attn(
            inner,
            enc_output,
            enc_output,
            cross_mask,
            cache=cache.cross_attn if isinstance(cache, LayerStore) else None,
            need_weights=need_weights,
            dropout_key=keys[2],
        )
        x = self.leave(x, attn_out, self.norm2, self.post_norm2, keys[3])

        inner = self.enter(x, self.norm3)
        ffn_out = self.ffn(inner, dropout_key=keys[4])
        return self.leave(x, ffn_out, self.norm3, self.post_norm3, keys[5]), weights

    def enter(
        self, x: Float[Array, "B T D"], norm: LayerNorm | RMSNorm | None
    ) -> Float[Array, "B T D"]:
        """What a sublayer reads."""
        return x if norm is None or self.config.placement in ("post", "output") else norm(x)

    def leave(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T D"],
        norm: LayerNorm | RMSNorm | None,
        post_norm: LayerNorm | RMSNorm | None,
        dropout_key: Key[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """x after a sublayer that put out `out`."""
        post_norm = norm if self.config.placement == "output" else post_norm
        out = out if post_norm is None else post_norm(out)
        x = x + self.dropout(out, dropout_key)
        return norm(x) if norm is not None and self.config.placement == "post" else x


def make_attention(
    config: LayerConfig, cross: bool = False, *, rngs: nnx.Rngs
) -> MultiHeadAttention:
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
        rngs=rngs,
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
        *,
        rngs: nnx.Rngs,
    ):
        config = document_config(
            d_model, num_heads, d_ff, dropout, activation, "post", causal=False
        )
        super().__init__(config, rngs=rngs)

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B N S S"] | None]:
        """Output and self-attention weights."""
        return super().__call__(x, self_mask=src_mask, need_weights=True, dropout_key=dropout_key)


class PreNormEncoderLayer(Block):
    """The lecture document's pre-norm layer of an encoder."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "pre", causal=False)
        super().__init__(config, rngs=rngs)

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B N S S"] | None]:
        """Output and self-attention weights."""
        return super().__call__(x, self_mask=src_mask, need_weights=True, dropout_key=dropout_key)


class DecoderLayer(Block):
    """The lecture document's post-norm layer of a decoder, with cross-attention."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        *,
        rngs: nnx.Rngs,
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "post", causal=True)
        super().__init__(config, cross_attention=True, rngs=rngs)

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"] | None,
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None = None,
        *,
        cache: LayerStore | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """Output and cross-attention weights."""
        return super().__call__(
            x,
            enc_output,
            tgt_mask,
            src_mask,
            cache=cache,
            need_weights=True,
            dropout_key=dropout_key,
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
        *,
        rngs: nnx.Rngs,
    ):
        config = document_config(d_model, num_heads, d_ff, dropout, activation, "pre", causal=True)
        super().__init__(config, cross_attention=True, rngs=rngs)

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"] | None,
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None = None,
        *,
        cache: LayerStore | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """Output and cross-attention weights."""
        return super().__call__(
            x,
            enc_output,
            tgt_mask,
            src_mask,
            cache=cache,
            need_weights=True,
            dropout_key=dropout_key,
        )
