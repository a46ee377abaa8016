"""Every setting of a training run, its presets, and its form on the command line and in JSON."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jax_transformer.config import Architecture, check_choice, check_positive, from_dict
from jax_transformer.errors import InputError

ScheduleName = Literal["noam", "noam-document"]
ComputeDtype = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["default", "high", "highest"]
LayerLayout = Literal["auto", "listed", "stacked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: by default the embedded English-German corpus."""

    source: Path | None = None
    """Text file of source sentences, one a line (`.gz` too). Needs `--data.target`."""
    target: Path | None = None
    """Text file of their translations, line by line."""
    tsv: Path | None = None
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
    """Global gradient norm above which gradients are scaled down."""
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
        for name in ("learning_rate_scale", "eps", "max_norm"):
            if not getattr(self, name) > 0.0:
                raise InputError(f"{name}={getattr(self, name)!r}: must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an encoder-decoder Transformer to translate."""

    preset: str = "small"
    """Where the other settings start from: `small` (minutes on a CPU), `original` (the base
    model of the paper), `original-big`, or `tiny` (seconds, for trying things out)."""
    steps: int = 3000
    """Updates to make."""
    out: Path | None = None
    """New directory for the run; by default `runs/<date>-<time>`."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="RUN_DIR")] = None
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
    runs faster; `auto` lists up to 12 layers a side."""
    compute_dtype: ComputeDtype = "float32"
    """Of the forward and backward pass; parameters and optimiser stay in float32."""
    matmul_precision: MatmulPrecision = "default"
    """Of float32 products on TPU and GPU, where `default` rounds inputs to bfloat16 or TF32."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: Architecture = dataclasses.field(default_factory=Architecture)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_positive(
            self, "steps", "tokens_per_batch", "evaluate_every", "checkpoint_every", "log_every"
        )
        if self.seed < 0:
            raise InputError(f"seed={self.seed}: must be at least 0")
        check_choice(self, "layers", LayerLayout)
        check_choice(self, "compute_dtype", ComputeDtype)
        check_choice(self, "matmul_precision", MatmulPrecision)

    @property
    def stacked(self) -> bool:
        """Whether training runs the layers under `lax.scan`."""
        deepest = max(self.model.num_encoder_layers, self.model.num_decoder_layers)
        return self.layers == "stacked" or (self.layers == "auto" and deepest > 12)


PRESETS: dict[str, TrainConfig] = {
    "small": TrainConfig(
        preset="small",
        model=Architecture(
            d_model=192,
            num_heads=6,
            d_ff=768,
            num_encoder_layers=2,
            num_decoder_layers=2,
            max_len=512,
            norm_placement="pre",
            activation="relu",
            tied_tables="all",
        ),
        optimizer=OptimizerConfig(learning_rate_scale=2.0, warmup_steps=400, average_decay=0.998),
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
RESUMABLE = ("steps", "resume", "evaluate_every", "checkpoint_every", "log_every")


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The settings of a command line: those of the preset, or of the run to resume, but for the
    flags given.

    Raises:
        InputError: an unknown preset, a value out of range, a run that cannot be resumed, or a
            flag that a resumed run cannot change.
        SystemExit: an unknown flag (code 2), or `--help`.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="small")
    first.add_argument("--resume", type=Path)
    known, _ = first.parse_known_args(arguments)
    if known.preset not in PRESETS:
        raise InputError(f"--preset={known.preset}: must be one of {', '.join(PRESETS)}")
    if known.resume is None:
        default = PRESETS[known.preset]
    else:
        default = load_config(known.resume / "config.json")
    config = tyro.cli(
        TrainConfig, default=default, args=arguments, config=(tyro.conf.FlagConversionOff,)
    )
    if config.resume is not None:
        for field in dataclasses.fields(TrainConfig):
            old, new = getattr(default, field.name), getattr(config, field.name)
            if field.name not in RESUMABLE and old != new:
                raise InputError(
                    f"--resume {config.resume} with another {field.name} ({new}, the run has "
                    f"{old}): a resumed run keeps it; start a new run to change it"
                )
    return config


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The settings as plain values, for a run's `config.json`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config) | {"resume": None})


def from_json(values: Any, *, place: str) -> TrainConfig:
    """The inverse of `to_json`.

    Raises:
        InputError: a key that is unknown or missing, or a value out of range.
    """
    config = from_dict(TrainConfig, values, place=place)

    def path(value: Any) -> Path | None:
        return None if value is None else Path(value)

    data = dataclasses.replace(
        config.data,
        source=path(config.data.source),
        target=path(config.data.target),
        tsv=path(config.data.tsv),
    )
    return dataclasses.replace(config, out=path(config.out), data=data)


def load_config(path: Path) -> TrainConfig:
    """The training settings in a run's `config.json`.

    Raises:
        InputError: the file is missing, is no JSON, or holds an unknown key.
    """
    return from_json(read_json(path).get("training"), place=f"{path}: training")


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
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): restore it from a copy") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object: restore it from a copy")
    return values
