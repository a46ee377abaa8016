"""A run directory: what is where, and how it is made and opened.

config.json       settings and model
tokenizer.json    of both languages
checkpoints/      latest/ (everything, to resume) and best/ (the model, to use)
metrics.jsonl     one line of numbers each time they are logged
tensorboard/      the same for TensorBoard
attention.json    one cross-attention, for the report
report.html       curves, translations, attention
"""

import datetime
import json
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

from jax_transformer.config import ModelConfig, from_dict
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import Tree, split
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import TrainConfig, read_json, to_json
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
            InputError: `out` is there already and is not an empty directory.
        """
        if out is None:
            now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
            out = Path("runs") / now
        if out.is_file():
            raise InputError(f"--out {out} is a file: choose a directory that is not there yet")
        if (out / "config.json").exists():
            raise InputError(
                f"--out {out} already holds a run: go on with it (--resume {out}) or choose "
                f"another directory"
            )
        if out.is_dir() and any(out.iterdir()):
            raise InputError(f"--out {out} is not empty: choose another directory")
        return cls(out)

    def create(self, config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        """Make the directory and write what defines the run, its config last."""
        self.path.mkdir(parents=True, exist_ok=True)
        tokenizer.save(self.tokenizer)
        values = {"training": to_json(config), "model": model.to_dict()}
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


def load_best(path: Path) -> TrainedModel:
    """The best model of the run at `path`.

    Raises:
        InputError: `path` is no run, or one that was stopped before its first evaluation, or its
            files do not fit each other.
    """
    run = RunDirectory(path)
    config = run.load_model_config()
    tokenizer = run.load_tokenizer(config)
    if not run.best.is_dir():
        raise InputError(
            f"{path} has no model to use yet, its run was stopped before the first evaluation: "
            f"go on with python train.py --resume {path}"
        )
    graphdef, params, buffers = abstract_model(config)
    with CheckpointStore(run.best) as store:
        best = store.restore(on_device({"params": params, "buffers": buffers}))
    return TrainedModel(config, tokenizer, graphdef, best["params"], best["buffers"])


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, Tree, Tree]:
    """`split` of a model whose leaves are shapes: nothing is drawn or stored."""
    return split(nnx.eval_shape(lambda: Transformer.from_config(config, rngs=nnx.Rngs(0))))


def on_device(tree: Tree, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """The shapes of `tree` with a place: by default the first device."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
    )
