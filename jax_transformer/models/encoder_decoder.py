"""The encoder-decoder Transformer."""

import math

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import (
    Activation,
    ModelConfig,
    NormPlacement,
    PositionEncoding,
    TiedTables,
)
from jax_transformer.layers.block import (
    DecoderLayer,
    EncoderLayer,
    LayerStore,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
)
from jax_transformer.layers.dropout import fold_keys
from jax_transformer.layers.linear import Embedding, OutputProjection
from jax_transformer.layers.mask import create_decoder_mask, create_padding_mask
from jax_transformer.layers.normalization import LayerNorm
from jax_transformer.layers.position import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from jax_transformer.layers.stack import apply_layers


def position_encoding_layer(
    kind: PositionEncoding, d_model: int, max_len: int, dropout: float, rngs: nnx.Rngs
) -> SinusoidalPositionalEncoding | LearnedPositionalEncoding:
    """The layer of that name."""
    if kind == "learned":
        return LearnedPositionalEncoding(d_model, max_len, dropout, rngs=rngs)
    return SinusoidalPositionalEncoding(d_model, max_len, dropout)


class TransformerEncoder(nnx.Module):
    """`norm(layers(dropout(embedding(src) sqrt(D) + pe)))`.

    The final norm follows both norm placements, as in the lecture document. Without a
    `vocab_size` the encoder has no table of its own and is given one at each call.
    """

    def __init__(
        self,
        vocab_size: int | None,
        d_model: int,
        num_heads: int,
        d_ff: int,
        num_layers: int,
        max_len: int = 5000,
        dropout: float = 0.1,
        *,
        norm_placement: NormPlacement = "post",
        activation: Activation = "gelu",
        position_encoding: PositionEncoding = "sinusoidal",
        rngs: nnx.Rngs,
    ):
        layer = PreNormEncoderLayer if norm_placement == "pre" else EncoderLayer
        self.embedding = None if vocab_size is None else Embedding(vocab_size, d_model, rngs=rngs)
        self.pos_encoding = position_encoding_layer(
            position_encoding, d_model, max_len, dropout, rngs
        )
        self.layers = nnx.List(
            [
                layer(d_model, num_heads, d_ff, dropout, activation, rngs=rngs)
                for _ in range(num_layers)
            ]
        )
        self.norm = LayerNorm(d_model)
        self.scale = math.sqrt(d_model)

    def __call__(
        self,
        src: Int[Array, "B S"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        embedding: Embedding | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output."""
        keys = fold_keys(dropout_key, 2)
        table = self.embedding if embedding is None else embedding
        if table is None:
            raise TypeError("an encoder without a table of its own needs one: embedding=...")
        x = table(src) * self.scale
        x = self.pos_encoding(x, positions, dropout_key=keys[0])
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(x, src_mask, dropout_key=key)[0],
            x,
            keys[1],
        )
        return self.norm(x)


class TransformerDecoder(nnx.Module):
    """`norm(layers(dropout(embedding(tgt) sqrt(D) + pe), enc_output))`."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        d_ff: int,
        num_layers: int,
        max_len: int = 5000,
        dropout: float = 0.1,
        *,
        norm_placement: NormPlacement = "post",
        activation: Activation = "gelu",
        position_encoding: PositionEncoding = "sinusoidal",
        rngs: nnx.Rngs,
    ):
        layer = PreNormDecoderLayer if norm_placement == "pre" else DecoderLayer
        self.embedding = Embedding(vocab_size, d_model, rngs=rngs)
        self.pos_encoding = position_encoding_layer(
            position_encoding, d_model, max_len, dropout, rngs
        )
        self.layers = nnx.List(
            [
                layer(d_model, num_heads, d_ff, dropout, activation, rngs=rngs)
                for _ in range(num_layers)
            ]
        )
        self.norm = LayerNorm(d_model)
        self.scale = math.sqrt(d_model)

    def __call__(
        self,
        tgt: Int[Array, "B T"],
        enc_output: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's output, all positions at once."""
        keys = fold_keys(dropout_key, 2)
        x = self.embed(tgt, positions, dropout_key=keys[0])
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(x, enc_output, src_mask, tgt_mask, dropout_key=key)[0],
            x,
            keys[1],
        )
        return self.norm(x)

    def step(
        self,
        tgt: Int[Array, "B T"],
        cache: list[LayerStore],
        src_mask: Bool[Array, "#B 1 #T S"] | None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None,
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The decoder's output for tokens that follow those in `cache`, one entry a layer."""
        x = self.embed(tgt, positions)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, _ = layer(x, None, src_mask, tgt_mask, cache=layer_cache)
        return self.norm(x)

    def cross_attention(
        self,
        tgt: Int[Array, "B T"],
        enc_output: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> list[Float[Array, "B N T S"]]:
        """The cross-attention weights of each layer."""
        x = self.embed(tgt, positions)
        weights = []
        for layer in self.layers:
            x, cross_weights = layer(x, enc_output, src_mask, tgt_mask)
            weights.append(cross_weights)
        return weights

    def embed(
        self,
        tgt: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T D"]:
        """What goes into the first layer."""
        x = self.embedding(tgt) * self.scale
        return self.pos_encoding(x, positions, dropout_key=dropout_key)


class Transformer(nnx.Module):
    """`logits = output_proj(decoder(tgt, encoder(src)))`.

    Kernels and tables are Xavier-uniform. Source: Vaswani et al. 2017; the lecture document.

    Raises:
        InputError: a hyperparameter out of range (see `ModelConfig`).
    """

    def __init__(
        self,
        src_vocab_size: int,
        tgt_vocab_size: int,
        d_model: int = 512,
        num_heads: int = 8,
        d_ff: int = 2048,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        max_len: int = 5000,
        dropout: float = 0.1,
        pad_idx: int = 0,
        *,
        norm_placement: NormPlacement = "post",
        activation: Activation = "gelu",
        position_encoding: PositionEncoding = "sinusoidal",
        tied_tables: TiedTables = "none",
        rngs: nnx.Rngs,
    ):
        self.config = ModelConfig(
            src_vocab_size=src_vocab_size,
            tgt_vocab_size=tgt_vocab_size,
            d_model=d_model,
            num_heads=num_heads,
            d_ff=d_ff,
            num_encoder_layers=num_encoder_layers,
            num_decoder_layers=num_decoder_layers,
            max_len=max_len,
            dropout=dropout,
            norm_placement=norm_placement,
            activation=activation,
            position_encoding=position_encoding,
            tied_tables=tied_tables,
        )
        self.pad_idx = pad_idx
        self.tied_tables = tied_tables
        self.encoder = TransformerEncoder(
            None if tied_tables == "all" else src_vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_encoder_layers,
            max_len,
            dropout,
            norm_placement=norm_placement,
            activation=activation,
            position_encoding=position_encoding,
            rngs=rngs,
        )
        self.decoder = TransformerDecoder(
            tgt_vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_decoder_layers,
            max_len,
            dropout,
            norm_placement=norm_placement,
            activation=activation,
            position_encoding=position_encoding,
            rngs=rngs,
        )
        self.output_proj = OutputProjection(
            d_model, tgt_vocab_size, tied=tied_tables != "none", rngs=rngs
        )

    @classmethod
    def from_config(cls, config: ModelConfig, *, rngs: nnx.Rngs) -> "Transformer":
        """The model that `config` describes."""
        return cls(**config.to_dict(), rngs=rngs)

    def make_src_mask(self, src: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
        """The lecture document's mask, from token values (see `create_padding_mask`)."""
        return create_padding_mask(src, self.pad_idx)

    def make_tgt_mask(self, tgt: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
        """The lecture document's mask, from token values."""
        return create_decoder_mask(tgt, self.pad_idx)

    def __call__(
        self,
        src: Int[Array, "B S"],
        tgt: Int[Array, "B T"],
        src_mask: Bool[Array, "#B 1 _ S"],
        tgt_mask: Bool[Array, "#B 1 #T T"],
        src_positions: Int[Array, "B S"] | None = None,
        tgt_positions: Int[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits for the token after each of `tgt` (which begins with the start token).

        The masks are not optional here: a model that guessed padding from token values would
        hide real tokens wherever the padding id is one of them.
        """
        keys = fold_keys(dropout_key, 2)
        enc_output = self.encode(src, src_mask, src_positions, dropout_key=keys[0])
        dec_output = self.decoder(
            tgt, enc_output, src_mask, tgt_mask, tgt_positions, dropout_key=keys[1]
        )
        return self.project(dec_output)

    def encode(
        self,
        src: Int[Array, "B S"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output, from the shared table where the tables are one."""
        table = self.decoder.embedding if self.tied_tables == "all" else None
        return self.encoder(src, src_mask, positions, embedding=table, dropout_key=dropout_key)

    def project(self, dec_output: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the decoder's output."""
        table = None if self.tied_tables == "none" else self.decoder.embedding.embedding[...]
        return self.output_proj(dec_output, table)
