"""What a model is: plain Python that imports neither framework, shared by both."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

from jax_transformer.errors import InputError

# Token ids, as in the lecture document's `greedy_decode` and `Transformer`.
PAD_ID = 0
UNK_ID = 1
BOS_ID = 2
EOS_ID = 3

# The label of a position that carries no loss (PyTorch's default `ignore_index`).
IGNORED_LABEL = -100

NormPlacement = Literal["post", "pre"]
Activation = Literal["gelu", "relu"]
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
    """`gelu`: x Phi(x), exact. `relu`: max(x, 0), the paper."""
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
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout={self.dropout!r}: must be at least 0 and below 1")
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


def check_positive(config: Any, *names: str) -> None:
    """Raise InputError unless each field is a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r}: must be a whole number of at least 1")


def check_choice(config: Any, name: str, choices: Any) -> None:
    """Raise InputError unless the field is one of the values of a `Literal`."""
    value = getattr(config, name)
    if value not in get_args(choices):
        raise InputError(f"{name}={value!r}: must be one of {', '.join(get_args(choices))}")


Config = TypeVar("Config")


def from_dict(cls: type[Config], values: Any, *, place: str) -> Config:
    """Build the dataclass `cls` from `values`, which JSON holds as `dataclasses.asdict` gives them.

    Fields that are dataclasses themselves are built from nested dicts, paths from their names.

    Raises:
        InputError: an unknown key (with the nearest names), a missing key, a value of another
            type or out of range. No key has a default here: what was saved says everything.
    """
    if not isinstance(values, dict):
        raise InputError(f"{place}: must be an object with named values, not {values!r}")
    types: dict[str, Any] = {
        name: kind
        for name, kind in get_type_hints(cls).items()
        if name in {field.name for field in dataclasses.fields(cast(Any, cls))}
    }
    for key in values:
        if key not in types:
            near = difflib.get_close_matches(key, types, n=3)
            known = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(types)}"
            raise InputError(f"{place}: unknown key {key!r}: {known}")
    for name in types:
        if name not in values:
            raise InputError(f"{place}: key {name!r} is missing: restore the file from a copy")
    fields = {name: from_json_value(values[name], types[name], place, name) for name in types}
    try:
        return cls(**fields)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def from_json_value(value: Any, kind: Any, place: str, name: str) -> Any:
    """`value` as the type `kind` of a setting: a number, text, a path, a choice, a dataclass.

    Raises:
        InputError: it is of another type. Ranges and choices are the dataclass's business.
    """
    if dataclasses.is_dataclass(kind):
        return from_dict(kind, value, place=f"{place}.{name}")
    if value is None and type(None) in get_args(kind):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and not (is_number and isinstance(value, int)):
        raise InputError(f"{place}: {name}={value!r}: must be a whole number")
    if kind is float and not is_number:
        raise InputError(f"{place}: {name}={value!r}: must be a number")
    if kind not in (int, float) and not isinstance(value, str):
        raise InputError(f"{place}: {name}={value!r}: must be text")
    return Path(value) if Path in get_args(kind) else value
