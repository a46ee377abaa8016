"""A run directory: what is where, and how it is made and opened.

config.json       settings, model, and a digest of the data
tokenizer.json    of both languages
checkpoints/      latest/ (everything, to resume) and best/ (the model, to use)
metrics.jsonl     one line of numbers each time they are logged
tensorboard/      the same for TensorBoard
attention.json    one cross-attention, for the report
report.html       curves, translations, attention
"""

import datetime
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_transformer.config import ModelConfig, from_dict
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import Tree, split
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import read_json
from jax_transformer.training.metrics import replace_file


class RunDirectory:
    """The paths of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.tokenizer = path / "tokenizer.json"
        self.attention = path / "attention.json"
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

    def create(self, values: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Make the directory and write what defines the run, its config last.

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
        tokenizer.save(self.tokenizer)
        self.save_config(values)

    def save_config(self, values: dict[str, Any]) -> None:
        """Write `config.json`: the settings, the model, the digest of the data."""
        replace_file(self.config, (json.dumps(values, indent=2) + "\n").encode())

    def load_model_config(self) -> ModelConfig:
        """The model of the run.

        Raises:
            InputError: as `read_json` and `from_dict`.
        """
        values = read_json(self.config)
        return from_dict(ModelConfig, values.get("model"), place=f"{self.config}: model")

    def load_tokenizer(self, model: ModelConfig) -> Tokenizer:
        """The tokenizer of the run.

        Raises:
            InputError: as `Tokenizer.load`; its vocabulary is not that of the model.
        """
        tokenizer = Tokenizer.load(self.tokenizer)
        if tokenizer.vocab_size != model.src_vocab_size:
            raise InputError(
                f"{self.tokenizer} has {tokenizer.vocab_size} tokens, but the model in "
                f"{self.config} has {model.src_vocab_size}: restore the run's own tokenizer"
            )
        return tokenizer


class TrainedModel(NamedTuple):
    """What a run has learnt."""

    config: ModelConfig
    tokenizer: Tokenizer
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
                f"evaluation: go on with python train.py --resume {path}"
            )
        best = store.restore(on_device({"params": params, "buffers": buffers}, sharding))
    return TrainedModel(config, tokenizer, graphdef, best["params"], best["buffers"])


@functools.cache
def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, Tree, Tree]:
    """`split` of a model whose leaves are shapes: nothing is drawn or stored."""
    return split(nnx.eval_shape(lambda: Transformer.from_config(config, rngs=nnx.Rngs(0))))


def on_device(tree: Tree, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """The shapes of `tree` with a place: by default the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
    )
