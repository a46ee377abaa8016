"""Every setting of a translation run, its presets, and the command line of `train.py`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from jax_transformer.config import Architecture, check_positive
from jax_transformer.errors import InputError
from jax_transformer.training.language_config import LANGUAGE_PRESETS, LanguageConfig
from jax_transformer.training.settings import (
    OptimizerConfig,
    RunConfig,
    TaskName,
    load_settings,
    parse_settings,
)

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
class TrainConfig(RunConfig):
    """Train an encoder-decoder Transformer to translate. (`train.py lm` trains a language model
    instead: see `train.py lm --help`.)"""

    task: ClassVar[TaskName] = "translation"

    preset: Annotated[str, tyro.conf.arg(metavar="{small,tiny,original,original-big}")] = "small"
    """Where the other settings start from: `small` (minutes on a CPU), `original` (the base
    model of the paper), `original-big`, or `tiny` (seconds, for trying things out)."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What to train on."""
    model: Architecture = dataclasses.field(default_factory=Architecture)
    """Size and form of the model."""


PRESETS: dict[str, TrainConfig] = {
    "small": TrainConfig(
        preset="small",
        steps=6000,
        evaluate_every=1500,
        tokens_per_batch=1024,
        data=DataConfig(vocab_size=2000),
        model=Architecture(
            d_model=128,
            num_heads=4,
            d_ff=512,
            num_encoder_layers=2,
            num_decoder_layers=2,
            max_len=512,
            dropout=0.1,
            norm_placement="pre",
            activation="relu",
            tied_tables="all",
        ),
        optimizer=OptimizerConfig(
            schedule="wsd",
            learning_rate=2.5e-3,
            warmup_steps=300,
            decay_fraction=0.6,
            final_fraction=0.0,
            average_decay=0.998,
        ),
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


def parse(arguments: Sequence[str] | None = None) -> TrainConfig | LanguageConfig:
    """The settings of a command line: of a translation run, or, after `lm`, of a language model.

    Raises:
        InputError: an unknown flag or preset, a value out of range, a run that cannot be resumed,
            or a flag that a resumed run cannot change.
        SystemExit: `--help`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "lm":
        return parse_settings(LanguageConfig, LANGUAGE_PRESETS, arguments[1:], prog="train.py lm")
    return parse_settings(TrainConfig, PRESETS, arguments, prog="train.py")


def load_config(path: Path) -> TrainConfig:
    """The settings in the `config.json` of a translation run.

    Raises:
        InputError: as `load_settings`.
    """
    return load_settings(TrainConfig, path)
