"""The encoder-decoder: the lecture document's Transformer, T5 or BART by configuration."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import (
    PAD_ID,
    Activation,
    EncoderDecoderConfig,
    ModelConfig,
    NormPlacement,
    PositionEncoding,
    TiedTables,
)
from torch_reference.layers.linear import OutputProjection
from torch_reference.layers.mask import (
    create_decoder_mask,
    create_look_ahead_mask,
    create_padding_mask,
)
from torch_reference.models.half import Half


class Encoder(Half):
    """The half that reads the source."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__(
            config, config.encoder, config.num_encoder_layers, config.src_vocab_size, config.audio
        )

    def forward(
        self,
        src: Int[Tensor, "B S"] | Float[Tensor, "B frames mels"],
        src_mask: Bool[Tensor, "#B 1 #S S"] | None = None,
        positions: Int[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        x = self.embed(src, positions)
        bias = self.bias(x, positions, positions)
        for layer in self.layers:
            x, _ = layer(x, self_mask=src_mask, bias=bias, positions=positions)
        return self.finish(x)


class Decoder(Half):
    """The half that writes the target and attends to what the encoder put out."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__(config, config.decoder, config.num_decoder_layers, config.tgt_vocab_size)

    def forward(
        self,
        tgt: Int[Tensor, "B T"],
        enc_output: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The decoder's output, all positions at once."""
        x = self.embed(tgt, positions)
        bias = self.bias(x, positions, positions)
        for layer in self.layers:
            x, _ = layer(x, enc_output, tgt_mask, src_mask, bias, positions)
        return self.finish(x)

    def cross_attention(
        self,
        tgt: Int[Tensor, "B T"],
        enc_output: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "#B 1 #T S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> list[Float[Tensor, "B N T S"] | None]:
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


class EncoderDecoder(nn.Module):
    """`logits = output_proj(logit_scale decoder(tgt, encoder(src)))`.

    Kernels and tables are Xavier-uniform. Source: Vaswani et al. 2017; Raffel et al. 2020 (T5:
    a relative bias, RMSNorm before each sublayer, no biases, unscaled scores).
    """

    config: EncoderDecoderConfig | ModelConfig

    def __init__(self, config: EncoderDecoderConfig, pad_idx: int = PAD_ID):
        super().__init__()
        self.config = config
        self.pad_idx = pad_idx
        self.logit_scale = config.logit_scale
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.output_proj = OutputProjection(
            config.decoder.d_model, config.tgt_vocab_size, bias=config.head_bias
        )
        if config.tied:
            self.output_proj.weight = self.decoder.embedding.weight
        if config.shared_embedding:
            self.encoder.embedding.weight = self.decoder.embedding.weight
        self._init_parameters()

    def _init_parameters(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def make_src_mask(self, src: Int[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
        """The lecture document's mask, from token values (see `create_padding_mask`)."""
        return create_padding_mask(src, self.pad_idx)

    def make_tgt_mask(self, tgt: Int[Tensor, "B T"]) -> Bool[Tensor, "B 1 T T"]:
        """The lecture document's mask, from token values."""
        return create_decoder_mask(tgt, self.pad_idx)

    def forward(
        self,
        src: Int[Tensor, "B S"] | Float[Tensor, "B frames mels"],
        tgt: Int[Tensor, "B T"],
        src_mask: Bool[Tensor, "#B 1 _ S"] | None = None,
        tgt_mask: Bool[Tensor, "#B 1 #T T"] | None = None,
        src_positions: Int[Tensor, "B S"] | None = None,
        tgt_positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits for the token after each of `tgt` (which begins with the start token).

        Without masks the document's own are made from token values.
        """
        src_mask = self.make_src_mask(src) if src_mask is None else src_mask
        tgt_mask = self.make_tgt_mask(tgt) if tgt_mask is None else tgt_mask
        enc_output = self.encode(src, src_mask, src_positions)
        dec_output = self.decoder(tgt, enc_output, src_mask, tgt_mask, tgt_positions)
        return self.project(dec_output)

    def encode(
        self,
        src: Int[Tensor, "B S"] | Float[Tensor, "B frames mels"],
        src_mask: Bool[Tensor, "#B 1 #S S"] | None = None,
        positions: Int[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        return self.encoder(src, src_mask, positions)

    def project(self, dec_output: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Logits of the decoder's output."""
        return self.output_proj(dec_output * self.logit_scale)

    @torch.no_grad()
    def greedy_decode(
        self,
        src: Int[Tensor, "B S"] | Float[Tensor, "B frames mels"],
        max_len: int = 50,
        bos_idx: int = 2,
        eos_idx: int = 3,
        src_mask: Bool[Tensor, "#B 1 _ S"] | None = None,
    ) -> Int[Tensor, "B T"]:
        """Start token and up to `max_len` most likely tokens, each step run over the whole prefix.

        A row that has ended stays ended: padding follows its end token, and decoding stops when
        all rows have. A row without any source token has ended at once. (The lecture document's
        loop goes on filling ended rows, and masks a padding id that the model itself chose.)
        Equal logits: the lowest id.
        """
        self.eval()
        src_mask = self.make_src_mask(src) if src_mask is None else src_mask
        enc_output = self.encode(src, src_mask)
        tgt = torch.full((src.shape[0], 1), bos_idx, dtype=torch.long, device=src.device)
        ended = ~src_mask.any(dim=-1).expand(src.shape[0], 1, 1).reshape(-1)
        for _ in range(max_len):
            tgt_mask = create_look_ahead_mask(tgt.shape[1], src.device)
            dec_output = self.decoder(tgt, enc_output, src_mask, tgt_mask)
            logits = self.project(dec_output[:, -1:])
            next_token = logits[:, 0].argmax(dim=-1)
            next_token = torch.where(ended, self.pad_idx, next_token)
            tgt = torch.cat([tgt, next_token[:, None]], dim=1)
            ended = ended | (next_token == eos_idx)
            if ended.all():
                break
        return tgt


class TransformerEncoder(Encoder):
    """The lecture document's encoder, with a final norm after both norm placements."""

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
        super().__init__(config.layers())


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
        super().__init__(config.layers())


class Transformer(EncoderDecoder):
    """The lecture document's model: `logits = output_proj(decoder(tgt, encoder(src)))`.

    Kernels and tables are Xavier-uniform. Arguments and `state_dict` names are the lecture
    document's, so that a checkpoint of it loads with `strict=True`; the keyword arguments are
    ours. Source: Vaswani et al. 2017; the lecture document.

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
        super().__init__(config.layers(), pad_idx)
        self.config = config

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Transformer":
        """The model that `config` describes."""
        return cls(**config.to_dict())
