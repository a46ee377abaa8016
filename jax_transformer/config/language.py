"""Models of blocks: decoder-only, encoder-only, encoder-decoder."""

import dataclasses
from typing import Any, Literal

from jax_transformer.config.audio import AudioConfig
from jax_transformer.config.checks import (
    check_above_zero,
    check_choice,
    check_optional_above_zero,
    check_positive,
    is_whole,
)
from jax_transformer.config.layers import Activation, LayerConfig
from jax_transformer.errors import InputError

Position = Literal["none", "sinusoidal", "learned", "rotary", "alibi", "t5"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyConfig:
    """A causal language model."""

    vocab_size: int
    """Number of token ids V, and the width of the logits."""
    layer: LayerConfig
    """Each of its blocks."""
    num_layers: int
    """Blocks L."""
    position: Position
    """`none`; `sinusoidal`, `learned`: a table added to the embeddings; `rotary`: in attention,
    by `layer.rotary`; `alibi`, `t5`: a bias on attention scores."""
    max_len: int = 2048
    """Rows of a position table; what the model was trained for otherwise."""
    position_offset: int = 0
    """The row of a learned table for position 0 (OPT: 2)."""
    relative_buckets: int = 32
    """`t5`: buckets of distances."""
    relative_max_distance: int = 128
    """`t5`: the distance from which on all share the last bucket."""
    embedding_scale: bool | float = False
    """What embeddings are multiplied by, rounded to their dtype; True: sqrt(D)."""
    embedding_norm: bool = False
    """A norm after the embeddings (BLOOM)."""
    final_norm: bool = True
    """A norm after the last block."""
    tied: bool = False
    """The output projection is the transpose of the embedding table."""
    head_bias: bool = False
    """Whether the output projection adds a bias."""
    logit_soft_cap: float | None = None
    """Logits become cap tanh(logit / cap); None: they stay."""
    local_layer: LayerConfig | None = None
    """Some of its blocks: as the others, but for `window` and `rotary` (Gemma 2 and 3)."""
    local_layers: tuple[int, ...] = ()
    """Which blocks these are, in ascending order."""

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "num_layers")
        check_optional_above_zero(self, "logit_soft_cap")
        check_positions(self, self.layer)
        check_causal("layer", self.layer, causal=True)
        check_local_layers(self)

    def layer_at(self, index: int) -> LayerConfig:
        """The block of that index."""
        local = self.local_layer if index in self.local_layers else None
        return self.layer if local is None else local

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of its blocks."""
        return frozenset(self.layer_at(index).window for index in range(self.num_layers))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOnlyConfig:
    """A bidirectional encoder with a pooler and a head for masked tokens, as BERT has them."""

    vocab_size: int
    """Number of token ids V."""
    layer: LayerConfig
    """Each of its blocks."""
    num_layers: int
    """Blocks L."""
    position: Position = "learned"
    """As `DecoderOnlyConfig.position`."""
    max_len: int = 512
    """Rows of a position table."""
    position_offset: int = 0
    """The row of a learned table for position 0 (RoBERTa: 2)."""
    relative_buckets: int = 32
    """`t5`: buckets of distances."""
    relative_max_distance: int = 128
    """`t5`: the distance from which on all share the last bucket."""
    token_types: int = 2
    """Rows of the table of token types (segments); 0: there is none."""
    embedding_scale: bool | float = False
    """What token embeddings are multiplied by, rounded to their dtype; True: sqrt(D)."""
    embedding_norm: bool = True
    """A norm after the embeddings."""
    final_norm: bool = False
    """A norm after the last block."""
    pooler: bool = True
    """tanh(W h_0 + b) of the first token."""
    token_head: bool = True
    """Logits of masked tokens: `norm(activation(W h + b)) E^T + c`."""
    head_activation: Activation = "gelu"
    """The nonlinearity of that head."""

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "num_layers")
        check_not_negative(self, "token_types")
        check_choice(self, "head_activation", Activation)
        check_positions(self, self.layer)
        check_causal("layer", self.layer, causal=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """An encoder and a decoder that attends to it."""

    src_vocab_size: int | None
    """Number of source token ids; None: the source is `audio`."""
    tgt_vocab_size: int
    """Number of target token ids, and the width of the logits."""
    encoder: LayerConfig
    """Each of the encoder's blocks."""
    decoder: LayerConfig
    """Each of the decoder's blocks."""
    num_encoder_layers: int
    """Blocks of the encoder."""
    num_decoder_layers: int
    """Blocks of the decoder."""
    position: Position
    """As `DecoderOnlyConfig.position`, of both halves (each has a table of its own)."""
    max_len: int = 512
    """Rows of a position table; what the model was trained for otherwise."""
    position_offset: int = 0
    """The row of a learned table for position 0 (BART: 2)."""
    sinusoid_halves: bool = False
    """`sinusoidal`: all sines before all cosines (Marian); else they alternate."""
    relative_buckets: int = 32
    """`t5`: buckets of distances."""
    relative_max_distance: int = 128
    """`t5`: the distance from which on all share the last bucket."""
    embedding_scale: bool | float = False
    """What embeddings are multiplied by, rounded to their dtype; True: sqrt(D)."""
    embedding_norm: bool = False
    """A norm after the embeddings (BART)."""
    final_norm: bool = True
    """A norm after the last block of each half."""
    final_dropout: bool = False
    """Dropout of what each half puts out (T5)."""
    shared_embedding: bool = False
    """Source and target read one table (needs one vocabulary)."""
    tied: bool = False
    """The output projection is the transpose of the target embedding table."""
    head_bias: bool = True
    """Whether the output projection adds a bias."""
    logit_scale: float = 1.0
    """What the decoder's output is multiplied by before it is projected (T5, tied: D^-0.5)."""
    audio: AudioConfig | None = None
    """The source where it is no tokens (Whisper); it has positions of its own."""

    def __post_init__(self) -> None:
        check_positive(self, "tgt_vocab_size", "num_encoder_layers", "num_decoder_layers")
        check_source(self)
        check_above_zero(self, "logit_scale")
        for half in (self.encoder, self.decoder):
            check_positions(self, half)
        if self.sinusoid_halves and self.position != "sinusoidal":
            raise InputError(
                f"sinusoid_halves with position={self.position!r}: only a sinusoidal table has an "
                f"order of sines and cosines"
            )
        check_causal("encoder", self.encoder, causal=False)
        check_causal("decoder", self.decoder, causal=True)
        if self.encoder.d_model != self.decoder.d_model:
            raise InputError(
                f"encoder.d_model={self.encoder.d_model}, decoder.d_model="
                f"{self.decoder.d_model}: the decoder reads what the encoder writes, give one width"
            )
        if self.decoder.placement == "parallel":
            raise InputError(
                "decoder.placement='parallel': not with attention to an encoder between the two"
            )
        if self.decoder.window is not None:
            raise InputError(
                f"decoder.window={self.decoder.window}: an encoder-decoder has no sliding window, "
                f"leave it None"
            )
        if self.shared_embedding and self.src_vocab_size != self.tgt_vocab_size:
            raise InputError(
                f"shared_embedding with src_vocab_size={self.src_vocab_size} and "
                f"tgt_vocab_size={self.tgt_vocab_size}: one table needs one vocabulary"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)


def check_source(config: EncoderDecoderConfig) -> None:
    """Raise InputError unless the source is either tokens or audio."""
    if config.audio is None:
        check_positive(config, "src_vocab_size")
        return
    if config.src_vocab_size is not None:
        raise InputError(
            f"audio with src_vocab_size={config.src_vocab_size}: the source is one of the two, set "
            f"the other to None"
        )
    if config.position != "learned":
        raise InputError(
            f"audio with position={config.position!r}: a decoder of audio has learned positions"
        )


def check_positions(config: Any, layer: LayerConfig) -> None:
    """Raise InputError unless the fields about positions go together."""
    check_choice(config, "position", Position)
    check_positive(config, "max_len", "relative_buckets", "relative_max_distance")
    check_not_negative(config, "position_offset")
    if not isinstance(config.embedding_scale, bool):
        check_above_zero(config, "embedding_scale")
    if (config.position == "rotary") != (layer.rotary is not None):
        raise InputError(
            f"position={config.position!r} with a layer of rotary={layer.rotary!r}: rotary "
            f"positions need both, others neither"
        )
    if config.position_offset and config.position != "learned":
        raise InputError(
            f"position_offset={config.position_offset} with position={config.position!r}: only a "
            f"learned table has rows to skip"
        )


def check_local_layers(config: DecoderOnlyConfig) -> None:
    """Raise InputError unless the blocks of `local_layer` are some of all, and like the others."""
    local, indices = config.local_layer, config.local_layers
    if (local is None) != (not indices):
        raise InputError(
            f"local_layer={local!r} with local_layers={indices!r}: give both or neither"
        )
    inside = all(isinstance(i, int) and 0 <= i < config.num_layers for i in indices)
    if not isinstance(indices, tuple) or not inside or list(indices) != sorted(set(indices)):
        raise InputError(
            f"local_layers={indices!r}: must be a tuple of different indices of the "
            f"{config.num_layers} layers, in ascending order"
        )
    if local is None:
        return
    for field in dataclasses.fields(local):
        value, other = getattr(local, field.name), getattr(config.layer, field.name)
        if field.name not in ("window", "rotary") and value != other:
            raise InputError(
                f"local_layer.{field.name}={value!r} with layer.{field.name}={other!r}: the blocks "
                f"may differ in window and rotary only"
            )
    check_positions(config, local)


def check_not_negative(config: Any, name: str) -> None:
    """Raise InputError unless the field is a whole number of at least 0."""
    value = getattr(config, name)
    if not is_whole(value):
        raise InputError(f"{name}={value!r}: must be a whole number of at least 0")


def check_causal(name: str, layer: LayerConfig, *, causal: bool) -> None:
    """Raise InputError unless the layer is causal, or is not, as its place demands."""
    if layer.causal != causal:
        raise InputError(f"{name}.causal={layer.causal}: must be {causal} there")
