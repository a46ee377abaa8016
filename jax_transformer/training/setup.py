"""Everything that a training run needs, made and checked before anything is written."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_transformer.config import ModelConfig
from jax_transformer.data import corpora
from jax_transformer.data.batches import Batches
from jax_transformer.data.corpora import Corpus
from jax_transformer.data.text import read_parallel, read_tsv
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.layers.stack import stack_layers, stack_template, unstack_layers
from jax_transformer.models.encoder_decoder import Transformer
from jax_transformer.models.parameters import Tree, split
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import (
    DataConfig,
    TrainConfig,
    check_unchanged,
    load_config,
    read_json,
    to_json,
)
from jax_transformer.training.evaluate import Evaluator
from jax_transformer.training.mesh import data_mesh, replicated
from jax_transformer.training.metrics import read_metrics
from jax_transformer.training.optimizer import adam
from jax_transformer.training.run import RunDirectory, abstract_model, on_device
from jax_transformer.training.schedule import noam_document_schedule, noam_schedule
from jax_transformer.training.step import (
    StepMetrics,
    TrainState,
    make_train_step,
    start_state,
)
from jax_transformer.training.window import LogWindow

DROPOUT_STREAM = 1
"""Folded into the seed's key, so that dropout and initialisation never share a key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A run about to start, or to go on."""

    config: TrainConfig
    run: RunDirectory
    corpus: Corpus
    tokenizer: Tokenizer
    model_config: ModelConfig
    batches: Batches
    valid_evaluator: Evaluator
    test_evaluator: Evaluator
    mesh: Mesh
    schedule: optax.Schedule
    train_step: Callable[[TrainState, Tree, Any], tuple[TrainState, StepMetrics]]
    state: TrainState
    buffers: Tree
    window: LogWindow
    start_step: int
    parameters: int
    like: Tree
    """Shapes of the parameters in the canonical layout: layers as a list."""

    def learning_rate(self, step: int) -> float:
        """The rate of the update after `step` updates."""
        return float(np.asarray(self.schedule(step)))

    def canonical(self, tree: Tree) -> Tree:
        """A tree of the training state with its layers as a list."""
        return to_canonical(tree, self.like) if self.config.stacked else tree

    def saved_config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {
            "task": "translation",
            "training": to_json(self.config),
            "model": self.model_config.to_dict(),
            "data": {"sha256": digest(self.corpus)},
        }

    def summary(self) -> str:
        """What is about to happen, for the terminal."""
        corpus = self.corpus
        skipped = f" ({corpus.train.skipped:,} with a blank side left out)"
        devices = self.mesh.devices.size
        return (
            f"{len(corpus.train):,} sentence pairs to train on"
            f"{skipped if corpus.train.skipped else ''}, {len(corpus.valid):,} to validate, "
            f"{len(corpus.test):,} to test\n"
            f"{self.tokenizer.vocab_size:,} tokens in the vocabulary, "
            f"{len(self.batches):,} batches an epoch\n"
            f"{self.parameters:,} parameters on {devices} "
            f"{jax.devices()[0].platform.upper()} device{'s' if devices > 1 else ''}\n"
            f"Run directory: {self.run.path}"
        )


def prepare(config: TrainConfig) -> Setup:
    """Read the data, make the tokenizer, the model and the optimiser; restore a run to resume.

    Raises:
        InputError: anything that cannot be used.
    """
    if config.resume is None:
        run = RunDirectory.new(config.out)
    else:
        run = RunDirectory(config.resume)
        check_resumable(config, run)
    corpus = load_corpus(config.data, config.seed)
    tokenizer, model_config = load_or_make_model(config, run, corpus)
    mesh = data_mesh()
    batches = Batches(
        tokenizer.encode_batch(corpus.train.sources, max_length=model_config.max_len),
        tokenizer.encode_batch(corpus.train.targets, max_length=model_config.max_len),
        tokens_per_batch=config.tokens_per_batch,
        seed=config.seed,
        vocab_size=tokenizer.vocab_size,
        max_length=model_config.max_len,
    )
    canonical, params, _ = abstract_model(model_config)
    schedule = make_schedule(config, model_config.d_model)
    optimizer = adam(
        schedule,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        max_norm=config.optimizer.max_norm,
    )
    graphdef, state, buffers = start(config, model_config, optimizer, mesh)
    evaluators = [
        Evaluator(canonical, buffers, model_config, tokenizer, text)
        for text in (corpus.valid, corpus.test)
    ]
    window = LogWindow.empty()
    if config.resume is not None:
        state, window = restore(config, run, params, state, mesh)
    train_step = make_train_step(
        graphdef,
        optimizer,
        label_smoothing=config.optimizer.label_smoothing,
        dropout_key=jax.random.fold_in(jax.random.key(config.seed), DROPOUT_STREAM),
        compute_dtype=jnp.dtype(config.compute_dtype),
        average_decay=config.optimizer.average_decay,
    )
    return Setup(
        config=config,
        run=run,
        corpus=corpus,
        tokenizer=tokenizer,
        model_config=model_config,
        batches=batches,
        valid_evaluator=evaluators[0],
        test_evaluator=evaluators[1],
        mesh=mesh,
        schedule=schedule,
        train_step=train_step,
        state=state,
        buffers=buffers,
        window=window,
        start_step=int(state.step),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        like=params,
    )


def check_resumable(config: TrainConfig, run: RunDirectory) -> None:
    """Find out that a run cannot go on before anything is computed.

    Raises:
        InputError: no run, a setting that a resumed run cannot change, no checkpoint yet, or
            nothing left to do.
    """
    check_unchanged(config, load_config(run.config))
    with CheckpointStore(run.latest) as store:
        step = store.chosen_step()
    if step is None:
        raise InputError(
            f"{run.path} was stopped before its first checkpoint: delete it and start again"
        )
    scored = any(line["kind"] == "test" for line in read_metrics(run.path) if line["step"] == step)
    if step > config.steps or (step == config.steps and scored):
        raise InputError(
            f"--resume {run.path}: all {step:,} steps are done; to train on, say how far with "
            f"--steps"
        )


def load_or_make_model(
    config: TrainConfig, run: RunDirectory, corpus: Corpus
) -> tuple[Tokenizer, ModelConfig]:
    """Tokenizer and model config: those of the run to resume, or new ones.

    Raises:
        InputError: the files of the run do not fit each other or the data.
    """
    if config.resume is None:
        text = [*corpus.train.sources, *corpus.train.targets]
        tokenizer = Tokenizer.train(text, config.data.vocab_size)
        model_config = ModelConfig(
            **dataclasses.asdict(config.model),
            src_vocab_size=tokenizer.vocab_size,
            tgt_vocab_size=tokenizer.vocab_size,
        )
        return tokenizer, model_config
    if read_json(run.config).get("data") != {"sha256": digest(corpus)}:
        raise InputError(
            f"--resume {run.path}: the training data are not those that the run was started "
            f"with: restore the files, or start a new run"
        )
    model_config = run.load_model_config()
    return run.load_tokenizer(model_config), model_config


def digest(corpus: Corpus) -> str:
    """A hash of all sentences, by which a resumed run knows its data again."""
    parts = [(text.sources, text.targets) for text in (corpus.train, corpus.valid, corpus.test)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load_corpus(data: DataConfig, seed: int) -> Corpus:
    """The user's files, split, or the embedded corpus.

    Raises:
        InputError: a file that cannot be used (see `data.text`).
    """
    if data.tsv is not None:
        text = read_tsv(data.tsv)
    elif data.source is not None and data.target is not None:
        text = read_parallel(data.source, data.target)
    else:
        return corpora.load()
    return corpora.split(text, valid=data.valid_size, test=data.test_size, seed=seed)


def make_schedule(config: TrainConfig, d_model: int) -> optax.Schedule:
    """The schedule of that name."""
    optimizer = config.optimizer
    schedule = noam_schedule if optimizer.schedule == "noam" else noam_document_schedule
    return schedule(d_model, optimizer.warmup_steps, optimizer.learning_rate_scale)


def start(
    config: TrainConfig,
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> tuple[nnx.GraphDef, TrainState, Tree]:
    """The model's structure as it is trained, the state before the first step, the buffers."""
    model = Transformer.from_config(model_config, rngs=nnx.Rngs(config.seed))
    graphdef, params, buffers = split(model)
    if config.stacked:
        params = stack_layers(params)
        graphdef, _, _ = split(stack_template(model))
    state = start_state(params, optimizer, average_decay=config.optimizer.average_decay)
    state, buffers = jax.device_put((state, buffers), replicated(mesh))
    return graphdef, state, buffers


def restore(
    config: TrainConfig, run: RunDirectory, like: Tree, state: TrainState, mesh: Mesh
) -> tuple[TrainState, LogWindow]:
    """What the run's newest checkpoint holds, the state in the layout of `state`.

    Raises:
        InputError: there is no checkpoint, or it does not fit.
    """
    expected = checkpoint_tree(state, LogWindow.empty())
    if config.stacked:
        expected = jax.eval_shape(lambda tree: to_canonical(tree, like), expected)
    with CheckpointStore(run.latest) as store:
        values = store.restore(on_device(expected, replicated(mesh)))
    window = LogWindow(**jax.device_get(values.pop("window")))
    if config.stacked:
        values = map_params(stack_layers, values)
    return TrainState(**values), window


def checkpoint_tree(state: TrainState, window: LogWindow) -> Tree:
    """What a checkpoint holds: all that a run needs to go on exactly."""
    return state._asdict() | {"window": window._asdict()}


def to_canonical(tree: Tree, like: Tree) -> Tree:
    """Undo `stack_layers` in everything of `tree` that is shaped like the parameters."""
    return map_params(lambda part: unstack_layers(part, like), tree)


def map_params(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Apply `function` to each part of a training state that is a tree of parameters or moments:
    the nested dicts that hold an encoder."""

    def is_params(node: object) -> bool:
        return isinstance(node, dict) and "encoder" in node

    return jax.tree.map(
        lambda node: function(node) if is_params(node) else node, tree, is_leaf=is_params
    )
