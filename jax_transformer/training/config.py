"""Every setting of a training run, its presets, and its form on the command line and in JSON."""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jax_transformer.arguments import parse_arguments
from jax_transformer.config import Architecture, check_choice, check_positive, from_dict
from jax_transformer.errors import InputError

ScheduleName = Literal["noam", "noam-document"]
ComputeDtype = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["default", "high", "highest"]
LayerLayout = Literal["auto", "listed", "stacked"]

TextFile = Annotated[
    Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the embedded corpus)")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: by default the embedded English-German corpus."""

    source: TextFile = None
    """Text file of source sentences, one a line (`.gz` too). Needs `--data.target`."""
    target: TextFile = None
    """Text file of their translations, line by line."""
    tsv: TextFile = None
    """One file instead of two: `source<TAB>target` a line."""
    valid_size: int = 500
    """Sentence pairs held out of your data for validation (at most a tenth of it)."""
    test_size: int = 500
    """Sentence pairs held out of your data for the final test (at most a tenth of it)."""
    vocab_size: int = 4000
    """Tokens of the byte-level BPE vocabulary that both languages share."""

    def __post_init__(self) -> None:
        check_positive(self, "valid_size", "test_size", "vocab_size")
        if (self.source is None) != (self.target is None):
            given, missing = ("source", "target") if self.target is None else ("target", "source")
            raise InputError(
                f"--data.{given}={getattr(self, given)} without --data.{missing}: "
                f"give both files of the parallel text"
            )
        if self.tsv is not None and self.source is not None:
            raise InputError(
                f"--data.tsv={self.tsv} and --data.source={self.source}: give one or the other"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam, its learning rate and the loss."""

    schedule: ScheduleName = "noam"
    """`noam`: the paper's. `noam-document`: the same one update late, as in the lecture
    document's loop, whose first update has rate 0."""
    learning_rate_scale: float = 1.0
    """Factor on the schedule."""
    warmup_steps: int = 4000
    """Updates over which the rate rises."""
    b1: float = 0.9
    """Decay of Adam's first moment."""
    b2: float = 0.98
    """Decay of Adam's second moment."""
    eps: float = 1e-9
    """Adam's epsilon, outside the root."""
    max_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down to it."""
    label_smoothing: float = 0.1
    """Probability mass spread over the vocabulary."""
    average_decay: float = 0.0
    """Decay per update of the running average of the parameters that is evaluated and saved as
    the best model; 0 evaluates the parameters themselves."""

    def __post_init__(self) -> None:
        check_choice(self, "schedule", ScheduleName)
        check_positive(self, "warmup_steps")
        for name in ("b1", "b2", "label_smoothing", "average_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"{name}={getattr(self, name)!r}: must be at least 0 and below 1")
        for name in ("learning_rate_scale", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)!r}: must be above 0 and finite")
        if not self.max_norm > 0.0:
            raise InputError(f"max_norm={self.max_norm!r}: must be above 0 (inf clips nothing)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an encoder-decoder Transformer to translate."""

    preset: Annotated[str, tyro.conf.arg(metavar="{small,tiny,original,original-big}")] = "small"
    """Where the other settings start from: `small` (minutes on a CPU), `original` (the base
    model of the paper), `original-big`, or `tiny` (seconds, for trying things out)."""
    steps: int = 3000
    """Updates to make."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/<date>-<time>)"),
    ] = None
    """New directory for the run."""
    resume: Annotated[
        Path | None,
        tyro.conf.arg(metavar="RUN_DIR", help_behavior_hint="(default: start a new run)"),
    ] = None
    """Go on with this run exactly where it stopped, with its settings."""
    seed: int = 0
    """Of initialisation, batch order and dropout."""
    tokens_per_batch: int = 2048
    """Tokens on each side of a batch, padding included."""
    evaluate_every: int = 500
    """Updates between evaluations: held-out loss, BLEU, sample translations."""
    checkpoint_every: int = 500
    """Updates between checkpoints."""
    log_every: int = 10
    """Updates between lines of the metrics file."""
    layers: LayerLayout = "auto"
    """`stacked` compiles one layer for any depth (`lax.scan`), `listed` each by itself, which
    runs faster; `auto` lists up to 8 layers a side."""
    compute_dtype: ComputeDtype = "float32"
    """Of the forward and backward pass; parameters and optimiser stay in float32."""
    matmul_precision: MatmulPrecision = "default"
    """Of float32 products on TPU and GPU, where `default` rounds inputs to bfloat16 or TF32."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What to train on."""
    model: Architecture = dataclasses.field(default_factory=Architecture)
    """Size and form of the model."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Adam, its learning rate and the loss."""

    def __post_init__(self) -> None:
        check_positive(
            self, "steps", "tokens_per_batch", "evaluate_every", "checkpoint_every", "log_every"
        )
        # JAX would take the seed modulo 2**32 without a word.
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed}: must be from 0 to {2**32 - 1}")
        check_choice(self, "layers", LayerLayout)
        check_choice(self, "compute_dtype", ComputeDtype)
        check_choice(self, "matmul_precision", MatmulPrecision)

    @property
    def stacked(self) -> bool:
        """Whether training runs the layers under `lax.scan`."""
        deepest = max(self.model.num_encoder_layers, self.model.num_decoder_layers)
        return self.layers == "stacked" or (self.layers == "auto" and deepest > 8)


PRESETS: dict[str, TrainConfig] = {
    "small": TrainConfig(
        preset="small",
        steps=4000,
        evaluate_every=1000,
        tokens_per_batch=1024,
        data=DataConfig(vocab_size=2000),
        model=Architecture(
            d_model=128,
            num_heads=4,
            d_ff=512,
            num_encoder_layers=2,
            num_decoder_layers=2,
            max_len=512,
            dropout=0.0,  # a few passes over the data: there is nothing to overfit yet
            norm_placement="pre",
            activation="relu",
            tied_tables="all",
        ),
        optimizer=OptimizerConfig(learning_rate_scale=0.5, warmup_steps=300, average_decay=0.998),
    ),
    "tiny": TrainConfig(
        preset="tiny",
        steps=200,
        tokens_per_batch=512,
        evaluate_every=100,
        checkpoint_every=100,
        data=DataConfig(vocab_size=1000),
        model=Architecture(
            d_model=64,
            num_heads=4,
            d_ff=128,
            num_encoder_layers=1,
            num_decoder_layers=1,
            max_len=512,
            norm_placement="pre",
            activation="relu",
            tied_tables="all",
        ),
        optimizer=OptimizerConfig(learning_rate_scale=2.0, warmup_steps=100),
    ),
    "original": TrainConfig(
        preset="original",
        steps=100_000,
        tokens_per_batch=25_000,
        evaluate_every=1000,
        checkpoint_every=1000,
        data=DataConfig(vocab_size=37_000),
        model=Architecture(activation="relu", tied_tables="all"),
    ),
    "original-big": TrainConfig(
        preset="original-big",
        steps=300_000,
        tokens_per_batch=25_000,
        evaluate_every=1000,
        checkpoint_every=1000,
        data=DataConfig(vocab_size=37_000),
        model=Architecture(
            d_model=1024,
            num_heads=16,
            d_ff=4096,
            dropout=0.3,
            activation="relu",
            tied_tables="all",
        ),
    ),
}

# What a resumed run may set anew: how long and how often, not what is computed.
RESUMABLE = ("steps", "evaluate_every", "checkpoint_every", "log_every")


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The settings of a command line: those of the preset, or of the run to resume, but for the
    flags given.

    Raises:
        InputError: an unknown flag or preset, a value out of range, a run that cannot be resumed,
            or a flag that a resumed run cannot change.
        SystemExit: `--help`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    resume, preset = value_of("--resume", arguments), value_of("--preset", arguments) or "small"
    if preset not in PRESETS:
        raise InputError(f"--preset={preset}: must be one of {', '.join(PRESETS)}")
    default = PRESETS[preset] if resume is None else load_config(Path(resume) / "config.json")
    config = parse_arguments(TrainConfig, arguments, prog="train.py", default=default)
    if resume is not None:
        check_unchanged(config, default)
    return config


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What follows `flag`, the last time that it is given: the settings that it names are the
    defaults of the other flags, so it is read before them."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = argument.partition("=")
        if name == flag:
            value = (attached if equals else following) or None
    return value


def check_unchanged(config: TrainConfig, saved: TrainConfig) -> None:
    """Refuse to go on with a run under settings that would compute something else.

    Raises:
        InputError: naming the first setting that differs.
    """
    before = dict(leaves(to_json(saved)))
    for name, value in leaves(to_json(config)):
        if value != before[name] and name not in RESUMABLE:
            raise InputError(
                f"--resume {config.resume} with {name}={value}: the run has {before[name]} and "
                f"keeps it; start a new run to change it"
            )


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The settings as plain values, for a run's `config.json`; `from_dict` is the inverse."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config) | {"resume": None})


def load_config(path: Path) -> TrainConfig:
    """The training settings in a run's `config.json`.

    Raises:
        InputError: the file is missing or is no JSON, a key is unknown or missing, or a value
            cannot be used.
    """
    return from_dict(TrainConfig, read_json(path).get("training"), place=f"{path}: training")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file of a run.

    Raises:
        InputError: the file is missing or is no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{path} is missing: {path.parent} is not a run directory of train.py"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): restore it from a copy") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object: restore it from a copy")
    return values
