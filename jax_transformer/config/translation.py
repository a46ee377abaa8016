"""The lecture document's encoder-decoder."""

import dataclasses
from typing import Any, Literal

from jax_transformer.config.checks import check_choice, check_fraction, check_positive
from jax_transformer.config.language import EncoderDecoderConfig
from jax_transformer.config.layers import Activation, LayerConfig
from jax_transformer.errors import InputError

NormPlacement = Literal["post", "pre"]
PositionEncoding = Literal["sinusoidal", "learned"]
TiedTables = Literal["none", "decoder", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The hyperparameters of an encoder-decoder Transformer, but for its vocabularies.

    The defaults are the "base" model of Vaswani et al. 2017, table 3, with the exact GELU in
    place of ReLU as in the lecture document.
    """

    d_model: int = 512
    """Width D of the residual stream."""
    num_heads: int = 8
    """Attention heads N; each is D/N wide."""
    d_ff: int = 2048
    """Inner width F of the feed-forward layers."""
    num_encoder_layers: int = 6
    """Layers of the encoder."""
    num_decoder_layers: int = 6
    """Layers of the decoder."""
    max_len: int = 5000
    """Rows of the position table: the longest sequence that the model accepts."""
    dropout: float = 0.1
    """Probability of zeroing an element, at each place where the lecture document has it."""
    norm_placement: NormPlacement = "post"
    """`post`: Norm(x + Sublayer(x)), the paper. `pre`: x + Sublayer(Norm(x))."""
    activation: Activation = "gelu"
    """`gelu`: x Phi(x), exact. `relu`: max(x, 0), the paper. Others: see `layers.feedforward`."""
    position_encoding: PositionEncoding = "sinusoidal"
    """`sinusoidal`: a fixed table. `learned`: a trained one."""
    tied_tables: TiedTables = "none"
    """Which tables are one: `decoder` ties the output projection to the target embedding,
    `all` the source embedding too (needs one vocabulary)."""

    def __post_init__(self) -> None:
        check_positive(
            self,
            "d_model",
            "num_heads",
            "d_ff",
            "num_encoder_layers",
            "num_decoder_layers",
            "max_len",
        )
        if self.d_model % self.num_heads:
            raise InputError(
                f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: "
                f"choose a width that is a multiple of the number of heads"
            )
        check_fraction(self, "dropout")
        check_choice(self, "norm_placement", NormPlacement)
        check_choice(self, "activation", Activation)
        check_choice(self, "position_encoding", PositionEncoding)
        check_choice(self, "tied_tables", TiedTables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """An architecture and its vocabularies: everything that defines a model."""

    src_vocab_size: int
    """Number of source token ids."""
    tgt_vocab_size: int
    """Number of target token ids, and the width of the logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "src_vocab_size", "tgt_vocab_size")
        if self.tied_tables == "all" and self.src_vocab_size != self.tgt_vocab_size:
            raise InputError(
                f"tied_tables='all' with src_vocab_size={self.src_vocab_size} and "
                f"tgt_vocab_size={self.tgt_vocab_size}: one table needs one vocabulary"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values: for JSON, and the arguments of `Transformer`."""
        return dataclasses.asdict(self)

    def layers(self) -> EncoderDecoderConfig:
        """The same model in the terms of the general encoder-decoder."""
        encoder, decoder = (
            LayerConfig(
                d_model=self.d_model,
                num_heads=self.num_heads,
                d_ff=self.d_ff,
                placement=self.norm_placement,
                activation=self.activation,
                dropout=self.dropout,
                causal=causal,
            )
            for causal in (False, True)
        )
        return EncoderDecoderConfig(
            src_vocab_size=self.src_vocab_size,
            tgt_vocab_size=self.tgt_vocab_size,
            encoder=encoder,
            decoder=decoder,
            num_encoder_layers=self.num_encoder_layers,
            num_decoder_layers=self.num_decoder_layers,
            position=self.position_encoding,
            max_len=self.max_len,
            embedding_scale=True,
            shared_embedding=self.tied_tables == "all",
            tied=self.tied_tables != "none",
        )
