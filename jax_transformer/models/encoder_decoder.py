"""The encoder-decoder: the lecture document's Transformer, T5 or BART by configuration."""

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jax_transformer.config import (
    PAD_ID,
    Activation,
    EncoderDecoderConfig,
    ModelConfig,
    NormPlacement,
    PositionEncoding,
    TiedTables,
)
from jax_transformer.layers.block import LayerStore
from jax_transformer.layers.dropout import fold_keys
from jax_transformer.layers.linear import Embedding, OutputProjection
from jax_transformer.layers.mask import create_decoder_mask, create_padding_mask
from jax_transformer.layers.stack import apply_layers
from jax_transformer.models.half import Half


class Encoder(Half):
    """The half that reads the source; it has no table where `shared_embedding` is set."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        vocab_size = None if config.shared_embedding else config.src_vocab_size
        super().__init__(
            config, config.encoder, config.num_encoder_layers, vocab_size, config.audio, rngs=rngs
        )

    def __call__(
        self,
        src: Int[Array, "B S"] | Float[Array, "B frames mels"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        embedding: Embedding | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output."""
        keys = fold_keys(dropout_key, 3)
        x = self.embed(src, positions, embedding=embedding, dropout_key=keys[0])
        bias = self.bias(x, positions, positions)
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(
                x, self_mask=src_mask, bias=bias, positions=positions, dropout_key=key
            )[0],
            x,
            keys[1],
        )
        return self.finish(x, dropout_key=keys[2])


class Decoder(Half):
    """The half that writes the target and attends to what the encoder put out."""

    embedding: Embedding

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config, config.decoder, config.num_decoder_layers, config.tgt_vocab_size, rngs=rngs
        )

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
        keys = fold_keys(dropout_key, 3)
        x = self.embed(tgt, positions, dropout_key=keys[0])
        bias = self.bias(x, positions, positions)
        x = apply_layers(
            self.layers,
            lambda layer, x, key: layer(
                x, enc_output, tgt_mask, src_mask, bias, positions, dropout_key=key
            )[0],
            x,
            keys[1],
        )
        return self.finish(x, dropout_key=keys[2])

    def step(
        self,
        tgt: Int[Array, "B T"],
        cache: list[LayerStore],
        src_mask: Bool[Array, "#B 1 #T S"] | None,
        tgt_mask: Bool[Array, "#B 1 #T _"] | None,
        positions: Int[Array, "B T"],
        key_positions: Int[Array, "B _"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's output for tokens that follow those in `cache`, one entry a layer.

        A bias between positions needs those of the cache's slots: `key_positions`.
        """
        if key_positions is None and self.position in ("alibi", "t5"):
            raise TypeError("a bias between positions needs those of the slots: key_positions=...")
        x = self.embed(tgt, positions)
        bias = self.bias(x, positions, key_positions)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, _ = layer(x, None, tgt_mask, src_mask, bias, positions, cache=layer_cache)
        return self.finish(x)

    def cross_attention(
        self,
        tgt: Int[Array, "B T"],
        enc_output: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Array, "#B 1 #T T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> list[Float[Array, "B N T S"] | None]:
        """The cross-attention weights of each layer."""
        x = self.embed(tgt, positions)
        bias = self.bias(x, positions, positions)
        weights = []
        for layer in self.layers:
            x, cross_weights = layer(
                x, enc_output, tgt_mask, src_mask, bias, positions, need_weights=True
            )
            weights.append(cross_weights)
        return weights


class EncoderDecoder(nnx.Module):
    """`logits = output_proj(logit_scale decoder(tgt, encoder(src)))`.

    Kernels and tables are Xavier-uniform. Source: Vaswani et al. 2017; Raffel et al. 2020 (T5:
    a relative bias, RMSNorm before each sublayer, no biases, unscaled scores).
    """

    config: EncoderDecoderConfig | ModelConfig

    def __init__(self, config: EncoderDecoderConfig, pad_idx: int = PAD_ID, *, rngs: nnx.Rngs):
        self.config = config
        self.pad_idx = pad_idx
        self.shared_embedding = config.shared_embedding
        self.tied = config.tied
        self.logit_scale = config.logit_scale
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.output_proj = OutputProjection(
            config.decoder.d_model,
            config.tgt_vocab_size,
            tied=config.tied,
            bias=config.head_bias,
            rngs=rngs,
        )

    def make_src_mask(self, src: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
        """The lecture document's mask, from token values (see `create_padding_mask`)."""
        return create_padding_mask(src, self.pad_idx)

    def make_tgt_mask(self, tgt: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
        """The lecture document's mask, from token values."""
        return create_decoder_mask(tgt, self.pad_idx)

    def __call__(
        self,
        src: Int[Array, "B S"] | Float[Array, "B frames mels"],
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
        src: Int[Array, "B S"] | Float[Array, "B frames mels"],
        src_mask: Bool[Array, "#B 1 #S S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output, from the shared table where there is one."""
        table = self.decoder.embedding if self.shared_embedding else None
        return self.encoder(src, src_mask, positions, embedding=table, dropout_key=dropout_key)

    def project(self, dec_output: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the decoder's output."""
        embedding = self.decoder.embedding if self.tied else None
        table = None if embedding is None else embedding.embedding[...]
        return self.output_proj(dec_output * self.logit_scale, table)


class TransformerEncoder(Encoder):
    """The lecture document's encoder, with a final norm after both norm placements.

    Without a `vocab_size` it has no table of its own and is given one at each call.
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
        config = ModelConfig(
            src_vocab_size=vocab_size or 1,
            tgt_vocab_size=vocab_size or 1,
            d_model=d_model,
            num_heads=num_heads,
            d_ff=d_ff,
            num_encoder_layers=num_layers,
            num_decoder_layers=num_layers,
            max_len=max_len,
            dropout=dropout,
            norm_placement=norm_placement,
            activation=activation,
            position_encoding=position_encoding,
            tied_tables="all" if vocab_size is None else "none",
        )
        super().__init__(config.layers(), rngs=rngs)


class TransformerDecoder(Decoder):
    """The lecture document's decoder, with a final norm after both norm placements."""

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
        config = ModelConfig(
            src_vocab_size=vocab_size,
            tgt_vocab_size=vocab_size,
            d_model=d_model,
            num_heads=num_heads,
            d_ff=d_ff,
            num_encoder_layers=num_layers,
            num_decoder_layers=num_layers,
            max_len=max_len,
            dropout=dropout,
            norm_placement=norm_placement,
            activation=activation,
            position_encoding=position_encoding,
        )
        super().__init__(config.layers(), rngs=rngs)


class Transformer(EncoderDecoder):
    """The lecture document's model: `logits = output_proj(decoder(tgt, encoder(src)))`.

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
        config = ModelConfig(
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
        super().__init__(config.layers(), pad_idx, rngs=rngs)
        self.config = config

    @classmethod
    def from_config(cls, config: ModelConfig, *, rngs: nnx.Rngs) -> "Transformer":
        """The model that `config` describes."""
        return cls(**config.to_dict(), rngs=rngs)
