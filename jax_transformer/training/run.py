"""A run directory: what is where, and how it is made and opened.

config.json       task, settings, model, and a digest of the data
tokenizer.json    of the text, or of both languages
source/           of a run that begins with a model of others: its config
checkpoints/      latest/ (everything, to resume) and best/ (the model, to use)
metrics.jsonl     one line of numbers each time they are logged
tensorboard/      the same for TensorBoard
attention.json    one cross-attention of a translation, for the report
report.html       curves, samples, attention
"""

import datetime
import functools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_transformer.config import (
    DecoderOnlyConfig,
    EncoderDecoderConfig,
    ModelConfig,
    from_dict,
)
from jax_transformer.data.characters import TextTokenizer, load_tokenizer
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.models.decoder_only import DecoderOnly
from jax_transformer.models.encoder_decoder import EncoderDecoder, Transformer
from jax_transformer.models.parameters import Tree, split
from jax_transformer.porting.formats.huggingface import companions
from jax_transformer.porting.generation import PART
from jax_transformer.porting.identify import family_named
from jax_transformer.porting.text import AnyTokenizer, MarianTokenizer, tokenizer_from
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.metrics import replace_file
from jax_transformer.training.settings import TaskName, read_json

AnyModelConfig = ModelConfig | EncoderDecoderConfig | DecoderOnlyConfig

MODEL_CONFIGS: dict[TaskName, type[AnyModelConfig]] = {
    "translation": ModelConfig,
    "language": DecoderOnlyConfig,
}
"""What kind of model a task trains from the beginning."""

FAMILY = "family"
"""In `config.json`: the family of a model that was made elsewhere and is only trained further."""


class RunDirectory:
    """The paths of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.tokenizer = path / "tokenizer.json"
        self.latest = path / "checkpoints" / "latest"
        self.best = path / "checkpoints" / "best"

    @classmethod
    def new(cls, out: Path | None) -> "RunDirectory":
        """A place for a new run, not made yet: `out`, or one named after the time.

        Raises:
            InputError: `out` cannot be made, or is there already and is not an empty directory.
        """
        if out is None:
            now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
            out = Path("runs") / now
        for path in (out, *out.parents):
            if path.exists() and not path.is_dir():
                raise InputError(f"--out {out}: {path} is a file: choose another directory")
        run = cls(out)
        run.check_empty()
        return run

    def check_empty(self) -> None:
        """Refuse to mix a new run with what is there.

        Raises:
            InputError: the directory holds a run, or anything else.
        """
        if self.config.exists():
            raise InputError(
                f"--out {self.path} already holds a run: go on with it (--resume {self.path}) or "
                f"choose another directory"
            )
        if self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"--out {self.path} is not empty: choose another directory")

    def create(
        self,
        values: dict[str, Any],
        tokenizer: AnyTokenizer,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Make the directory and write what defines the run, its config last.

        Args:
            values: the content of `config.json`.
            tokenizer: of the text.
            files: that belong to the model that the run begins with, by name.

        Raises:
            InputError: the directory cannot be made, or another run has begun in it meanwhile.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out {self.path} cannot be made ({error.strerror}): choose another directory"
            ) from None
        self.check_empty()
        for name, content in (files or {}).items():
            (self.path / name).parent.mkdir(exist_ok=True)
            replace_file(self.path / name, content)
        if not isinstance(tokenizer, MarianTokenizer):  # whose files are among these
            tokenizer.save(self.tokenizer)
        self.save_config(values)

    def save_config(self, values: dict[str, Any]) -> None:
        """Write `config.json`: the task, the settings, the model, the digest of the data."""
        replace_file(self.config, (json.dumps(values, indent=2) + "\n").encode())

    def load_task(self) -> TaskName:
        """What the run trains.

        Raises:
            InputError: as `read_json`; a task that is not known.
        """
        task = read_json(self.config).get("task")
        if task not in MODEL_CONFIGS:
            raise InputError(
                f"{self.config}: task={task!r}: must be one of {', '.join(MODEL_CONFIGS)}; "
                f"restore the file from a copy"
            )
        return task

    def load_model_config(self) -> AnyModelConfig:
        """The model of the run.

        Raises:
            InputError: as `read_json` and `from_dict`.
        """
        config_class: Any = MODEL_CONFIGS[self.load_task()]
        values = read_json(self.config)
        if FAMILY in values:
            config_class = family_named(str(values[FAMILY]), self.config).config
        config: Any = from_dict(config_class, values.get("model"), place=f"{self.config}: model")
        return config

    def check_digest(self, digest: str) -> None:
        """Refuse to go on with other data.

        Raises:
            InputError: the run was started with other data.
        """
        if read_json(self.config).get("data") != {"sha256": digest}:
            raise InputError(
                f"--resume {self.path}: the training data are not those that the run was started "
                f"with: restore the files, or start a new run"
            )

    def load_tokenizer(self, model: AnyModelConfig) -> AnyTokenizer:
        """The tokenizer of the run.

        Raises:
            InputError: as `load_tokenizer`; its vocabulary is not that of the model.
        """
        values, path = read_json(self.config), self.tokenizer
        if PART in values:
            family = family_named(str(values.get(FAMILY)), self.config)
            if (found := tokenizer_from(companions(self.path), family)) is None:
                raise InputError(f"{self.path} has no tokenizer: restore its files from a copy")
            return found
        load = load_tokenizer if isinstance(model, DecoderOnlyConfig) else Tokenizer.load
        tokenizer: TextTokenizer = load(path)
        expected = vocabulary_of(model)
        # A model that was made elsewhere may have rows to spare, or tokens added without any.
        if FAMILY not in values and tokenizer.vocab_size != expected:
            raise InputError(
                f"{path} has {tokenizer.vocab_size} tokens, but the model in {self.config} has "
                f"{expected}: restore the run's own tokenizer"
            )
        return tokenizer


class TrainedModel(NamedTuple):
    """What a run has learnt. Its kind is that of its config: a `ModelConfig` is the config of a
    translation model, a `DecoderOnlyConfig` that of a language model."""

    config: AnyModelConfig
    tokenizer: AnyTokenizer
    graphdef: nnx.GraphDef
    params: Tree
    buffers: Tree


def load_best(path: Path, sharding: jax.sharding.Sharding | None = None) -> TrainedModel:
    """The best model of the run at `path`, by default on the first device.

    Raises:
        InputError: `path` is no run, or one that was stopped before its first evaluation, or its
            files do not fit each other.
    """
    run = RunDirectory(path)
    config = run.load_model_config()
    tokenizer = run.load_tokenizer(config)
    graphdef, params, buffers = abstract_model(config)
    with CheckpointStore(run.best, by_score=True) as store:
        if store.chosen_step() is None:
            raise InputError(
                f"{path} has no model to use yet, its run was stopped before the first "
                f"evaluation: go on with {resume_command(path, run.load_task())}"
            )
        best = store.restore(on_device({"params": params, "buffers": buffers}, sharding))
    return TrainedModel(config, tokenizer, graphdef, best["params"], best["buffers"])


def resume_command(path: Path, task: TaskName) -> str:
    """What goes on with the run at `path`, for the terminal."""
    subcommand = "lm " if task == "language" else ""
    return f"python train.py {subcommand}--resume {shlex.quote(str(path))}"


def width_of(config: Any) -> int:
    """The width D of a model of any kind, given its config."""
    part = getattr(config, "layer", None) or getattr(config, "encoder", config)
    return part.d_model


def depth_of(config: AnyModelConfig) -> int:
    """Layers of a model, of the side with more of them."""
    if isinstance(config, DecoderOnlyConfig):
        return config.num_layers
    return max(config.num_encoder_layers, config.num_decoder_layers)


def vocabulary_of(config: AnyModelConfig) -> int:
    """Tokens of a model, of the side with fewer of them."""
    if isinstance(config, DecoderOnlyConfig):
        return config.vocab_size
    return min(config.src_vocab_size or config.tgt_vocab_size, config.tgt_vocab_size)


def make_model(config: AnyModelConfig, *, rngs: nnx.Rngs) -> EncoderDecoder | DecoderOnly:
    """The model of that config."""
    if isinstance(config, DecoderOnlyConfig):
        return DecoderOnly(config, rngs=rngs)
    if isinstance(config, EncoderDecoderConfig):
        return EncoderDecoder(config, rngs=rngs)
    return Transformer.from_config(config, rngs=rngs)


@functools.cache
def abstract_model(config: AnyModelConfig) -> tuple[nnx.GraphDef, Tree, Tree]:
    """`split` of a model whose leaves are shapes: nothing is drawn or stored."""
    return split(nnx.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0))))


def on_device(tree: Tree, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """The shapes of `tree` with a place: by default the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
    )
