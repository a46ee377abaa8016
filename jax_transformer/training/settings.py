"""What all training runs can be told: settings, their presets, the command line, and JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from jax_transformer.arguments import parse_arguments
from jax_transformer.config import check_choice, check_positive, from_dict
from jax_transformer.errors import InputError

TaskName = Literal["translation", "language"]
ScheduleName = Literal["noam", "noam-document", "cosine", "wsd"]
ComputeDtype = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["default", "high", "highest"]
LayerLayout = Literal["auto", "listed", "stacked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam or AdamW, its learning rate and the loss."""

    schedule: ScheduleName = "noam"
    """`noam`: the paper's. `noam-document`: the same one update late, as in the lecture
    document's loop, whose first update has rate 0. `cosine`: up to `learning-rate` and down to
    a part of it by half a cosine. `wsd` (warmup-stable-decay): constant between the two."""
    learning_rate: float = 1e-3
    """Peak of `cosine` and `wsd`."""
    learning_rate_scale: float = 1.0
    """Factor on every schedule."""
    warmup_steps: int = 4000
    """Updates over which the rate rises; a run that is shorter only begins to."""
    decay_fraction: float = 0.2
    """Of all steps: the last part, over which the rate of `wsd` falls."""
    final_fraction: float = 0.1
    """Of the peak: where `cosine` and `wsd` end."""
    b1: float = 0.9
    """Decay of Adam's first moment."""
    b2: float = 0.98
    """Decay of Adam's second moment."""
    eps: float = 1e-9
    """Adam's epsilon, outside the root."""
    weight_decay: float = 0.0
    """Part of each matrix (not of biases and norms) taken off it per update, times the rate."""
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
        for name in ("decay_fraction", "final_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name}={getattr(self, name)!r}: must be from 0 to 1")
        if not 0.0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay={self.weight_decay!r}: must be at least 0 and finite")
        for name in ("learning_rate", "learning_rate_scale", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)!r}: must be above 0 and finite")
        if not self.max_norm > 0.0:
            raise InputError(f"max_norm={self.max_norm!r}: must be above 0 (inf clips nothing)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the settings of every training run have, whatever it trains."""

    task: ClassVar[TaskName]

    preset: str
    """Where the other settings start from."""
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
    init_from: Annotated[
        Path | None,
        tyro.conf.arg(metavar="MODEL", help_behavior_hint="(default: a new model)"),
    ] = None
    """Begin with this model, its architecture and its tokenizer: a run, a ported directory, the
    folder of `transformers`, or a file that `jax-transformer port` takes."""
    init_optimizer: bool = False
    """Begin with its optimizer, too: with Adam's moments, and at the number of its updates."""
    seed: int = 0
    """Of initialisation, batch order and dropout."""
    tokens_per_batch: int = 2048
    """Tokens of a batch, padding included; for translation on each side."""
    evaluate_every: int = 500
    """Updates between evaluations: held-out loss and other scores, samples."""
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
        if self.init_optimizer and self.init_from is None:
            raise InputError("init_optimizer without init_from: name the model that it is of")

    @property
    def has_end(self) -> bool:
        """Whether the learning rate depends on the number of steps to make."""
        return self.optimizer.schedule in ("cosine", "wsd")

    @property
    def decay_steps(self) -> int:
        """Updates over which the rate falls at the end; of a cosine, at least one."""
        fraction = self.optimizer.decay_fraction if self.optimizer.schedule == "wsd" else 0.0
        return max(1, round(fraction * self.steps))


Settings = TypeVar("Settings", bound=RunConfig)

# What a resumed run may set anew: how long and how often, not what is computed.
RESUMABLE = ("steps", "evaluate_every", "checkpoint_every", "log_every")

BROUGHT = ("model", "data")
"""Groups of settings of which a model that a run begins with brings some along."""


def is_brought(group: str, name: str) -> bool:
    """Whether it brings that setting: all of its form but the length of rows, and its tokens."""
    return name != "context" if group == "model" else name in ("tokenizer", "vocab_size")


def parse_settings(
    settings: type[Settings],
    presets: Mapping[str, Settings],
    arguments: Sequence[str],
    *,
    prog: str,
) -> Settings:
    """The settings of a command line: those of the preset (by default the first), or of the run
    to resume, but for the flags given.

    Raises:
        InputError: an unknown flag or preset, a value out of range, a run that cannot be resumed,
            or a flag that a resumed run cannot change.
        SystemExit: `--help`.
    """
    resume = value_of("--resume", arguments)
    preset = value_of("--preset", arguments) or next(iter(presets))
    if preset not in presets:
        raise InputError(f"--preset={preset}: must be one of {', '.join(presets)}")
    default = presets[preset]
    if resume is not None:
        default = load_settings(settings, Path(resume) / "config.json")
    if default.init_from is not None or value_of("--init-from", arguments) is not None:
        check_no_architecture(arguments)
    config = parse_arguments(settings, arguments, prog=prog, default=default)
    if resume is not None:
        check_unchanged(config, default)
    return config


def check_no_architecture(arguments: Sequence[str]) -> None:
    """Refuse flags that describe a new model, or its tokens, where one is given.

    Raises:
        InputError: naming the first.
    """
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        group, _, name = flag.removeprefix("--").partition(".")
        if flag.startswith("--") and group in BROUGHT and is_brought(group, name.replace("-", "_")):
            raise InputError(
                f"{flag} with --init-from: architecture and tokenizer are those of the model, "
                f"leave it out"
            )


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What follows `flag`, the last time that it is given: the settings that it names are the
    defaults of the other flags, so it is read before them."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, attached = argument.partition("=")
        if name == flag:
            value = (attached if equals else following) or None
    return value


def check_unchanged(config: RunConfig, saved: RunConfig) -> None:
    """Refuse to go on with a run under settings that would compute something else.

    Raises:
        InputError: naming the first setting that differs.
    """
    before = dict(leaves(to_json(saved)))
    if config.has_end and config.steps != saved.steps:
        raise InputError(
            f"--resume {config.resume} with steps={config.steps}: the {config.optimizer.schedule} "
            f"schedule of the run ends at step {saved.steps} and would have been another; start a "
            f"new run to train longer"
        )
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


def to_json(config: RunConfig) -> dict[str, Any]:
    """The settings as plain values, for a run's `config.json`; `from_dict` is the inverse."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    values = plain(dataclasses.asdict(config) | {"resume": None})
    if config.init_from is not None:
        for group in BROUGHT:
            given = values[group].items()
            values[group] = {name: v for name, v in given if not is_brought(group, name)}
    return values


def load_settings(settings: type[Settings], path: Path) -> Settings:
    """The training settings in a run's `config.json`.

    Raises:
        InputError: the file is missing or is no JSON, a key is unknown or missing, or a value
            cannot be used; the run trains something else.
    """
    values = read_json(path)
    if (task := values.get("task", settings.task)) != settings.task:
        command = "python train.py lm" if task == "language" else "python train.py"
        raise InputError(
            f"{path}: the task of the run is {task}, not {settings.task}: go on with {command} "
            f"--resume {path.parent}"
        )
    return settings_from(settings, values.get("training"), place=f"{path}: training")


def settings_from(settings: type[Settings], values: Any, *, place: str) -> Settings:
    """The settings that `to_json` gives; those that a model brought along have their defaults.

    Raises:
        InputError: as `from_dict`.
    """
    if isinstance(values, dict) and values.get("init_from"):
        values = values | {
            field.name: dataclasses.asdict(field.default_factory()) | values[field.name]
            for field in dataclasses.fields(settings)
            if field.name in BROUGHT and isinstance(values.get(field.name), dict)
            if field.default_factory is not dataclasses.MISSING
        }
    return from_dict(settings, values, place=place)


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
