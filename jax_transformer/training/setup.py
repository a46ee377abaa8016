"""Everything that a training run needs, made and checked before anything is written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_transformer.errors import InputError
from jax_transformer.layers.stack import stack_layers, stack_template, unstack_layers
from jax_transformer.models.parameters import Tree, split
from jax_transformer.porting.pretrained import Pretrained
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import TrainConfig
from jax_transformer.training.initial import Given, brought_along, given, kept, load_initial
from jax_transformer.training.language import LanguageTask
from jax_transformer.training.language_config import LanguageConfig
from jax_transformer.training.mesh import data_mesh, replicated
from jax_transformer.training.metrics import read_metrics
from jax_transformer.training.optimizer import adam, moved_in
from jax_transformer.training.run import (
    AnyModelConfig,
    RunDirectory,
    abstract_model,
    depth_of,
    make_model,
    on_device,
    width_of,
)
from jax_transformer.training.schedule import (
    cosine_schedule,
    noam_document_schedule,
    noam_schedule,
    wsd_schedule,
)
from jax_transformer.training.settings import (
    LayerLayout,
    RunConfig,
    check_unchanged,
    load_settings,
    to_json,
)
from jax_transformer.training.step import (
    StepMetrics,
    TrainState,
    make_train_step,
    start_state,
)
from jax_transformer.training.task import Batches, Evaluator, Task
from jax_transformer.training.translation import TranslationTask
from jax_transformer.training.window import LogWindow

DROPOUT_STREAM = 1
"""Folded into the seed's key, so that dropout and initialisation never share a key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A run about to start, or to go on."""

    config: RunConfig
    run: RunDirectory
    task: Task
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
    stacked: bool
    """Whether the layers are trained as one."""
    brought: tuple[dict[str, Any], dict[str, bytes]]
    """Of a model that was made elsewhere, see `initial.brought_along`."""

    def learning_rate(self, step: int) -> float:
        """The rate of the update after `step` updates."""
        return float(np.asarray(self.schedule(step)))

    def canonical(self, tree: Tree) -> Tree:
        """A tree of the training state with its layers as a list."""
        return to_canonical(tree, self.like) if self.stacked else tree

    def saved_config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {
            "task": self.config.task,
            "training": to_json(self.config),
            "model": self.task.model_config.to_dict(),
            "data": {"sha256": self.task.digest()},
            **self.brought[0],
        }

    def summary(self) -> str:
        """What is about to happen, for the terminal."""
        devices = self.mesh.devices.size
        return (
            f"{self.task.summary()}\n"
            f"{self.parameters:,} parameters on {devices} "
            f"{jax.devices()[0].platform.upper()} device{'s' if devices > 1 else ''}\n"
            f"Run directory: {self.run.path}"
        )


def prepare(config: RunConfig) -> Setup:
    """Read the data, make the tokenizer, the model and the optimiser; restore a run to resume.

    Raises:
        InputError: anything that cannot be used.
    """
    if config.resume is None:
        run = RunDirectory.new(config.out)
        initial = load_initial(config)
        brought = brought_along(initial)
    else:
        run, initial = RunDirectory(config.resume), None
        check_resumable(config, run)
        brought = kept(run), {}
    task = read_task(config, run, given(config, run, initial))
    mesh = data_mesh()
    canonical, params, _ = abstract_model(task.model_config)
    stacked = stacks(config.layers, task.model_config)
    schedule = make_schedule(config, width_of(task.model_config))
    optimizer = adam(
        schedule,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        eps=config.optimizer.eps,
        max_norm=config.optimizer.max_norm,
        weight_decay=config.optimizer.weight_decay,
    )
    graphdef = structure(task.model_config, stacked)
    state, buffers = jax.device_put(
        start(config, task.model_config, initial, optimizer, stacked), replicated(mesh)
    )
    window = LogWindow.empty()
    if config.resume is not None:
        state, buffers, window = restore(run, params, (state, buffers), mesh, stacked)
    valid_evaluator, test_evaluator = task.evaluators(canonical, buffers)
    train_step = make_train_step(
        graphdef,
        optimizer,
        label_smoothing=config.optimizer.label_smoothing,
        loss=task.loss,
        dropout_key=jax.random.fold_in(jax.random.key(config.seed), DROPOUT_STREAM),
        compute_dtype=jnp.dtype(config.compute_dtype),
        average_decay=config.optimizer.average_decay,
    )
    return Setup(
        config=config,
        run=run,
        task=task,
        batches=task.batches,
        valid_evaluator=valid_evaluator,
        test_evaluator=test_evaluator,
        mesh=mesh,
        schedule=schedule,
        train_step=train_step,
        state=state,
        buffers=buffers,
        window=window,
        start_step=int(state.step),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        like=params,
        stacked=stacked,
        brought=brought,
    )


def check_resumable(config: RunConfig, run: RunDirectory) -> None:
    """Find out that a run cannot go on before anything is computed.

    Raises:
        InputError: no run, a setting that a resumed run cannot change, no checkpoint yet, or
            nothing left to do.
    """
    check_unchanged(config, load_settings(type(config), run.config))
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


def read_task(config: RunConfig, run: RunDirectory, given: Given | None) -> Task:
    """The task that the settings are of, its data read and checked.

    Raises:
        InputError: data, or the files of a run to resume, that cannot be used.
    """
    if isinstance(config, LanguageConfig):
        return LanguageTask.read(config, run, given)
    assert isinstance(config, TrainConfig)
    return TranslationTask.read(config, run, given)


def make_schedule(config: RunConfig, d_model: int) -> optax.Schedule:
    """The schedule of that name, for a model of width D."""
    chosen, scale = config.optimizer, config.optimizer.learning_rate_scale
    warmup, final, peak = chosen.warmup_steps, chosen.final_fraction, scale * chosen.learning_rate
    if chosen.schedule == "cosine":
        return cosine_schedule(peak, config.steps, warmup, final)
    if chosen.schedule == "wsd":
        return wsd_schedule(peak, config.steps, warmup, config.decay_steps, final)
    schedule = noam_schedule if chosen.schedule == "noam" else noam_document_schedule
    return schedule(d_model, warmup, scale)


def stacks(layers: LayerLayout, model: AnyModelConfig) -> bool:
    """Whether training runs the layers under `lax.scan`; `auto`: where they are many and alike."""
    if layers == "auto":
        return depth_of(model) > 8 and getattr(model, "local_layer", None) is None
    return layers == "stacked"


def structure(model_config: AnyModelConfig, stacked: bool) -> nnx.GraphDef:
    """The model's structure as it is trained.

    Raises:
        InputError: layers that cannot be stacked.
    """
    model = nnx.eval_shape(lambda: make_model(model_config, rngs=nnx.Rngs(0)))
    return split(stack_template(model) if stacked else model)[0]


def start(
    config: RunConfig,
    model_config: AnyModelConfig,
    initial: Pretrained | None,
    optimizer: optax.GradientTransformation,
    stacked: bool,
) -> tuple[TrainState, Tree]:
    """The state before the first step, and the buffers: of a new model, or of `initial`."""
    if initial is None:
        _, params, buffers = split(make_model(model_config, rngs=nnx.Rngs(config.seed)))
    else:
        params, buffers = initial.params, initial.buffers

    def laid_out(tree: Tree) -> Tree:
        return stack_layers(tree) if stacked else tree

    decay = config.optimizer.average_decay
    state = start_state(laid_out(params), optimizer, average_decay=decay)
    moved = None if initial is None else initial.optimizer
    if moved is None:
        return state, buffers
    average = state.average
    if decay and moved.average is not None:
        average = laid_out(moved.average)
    opt_state = moved_in(
        state.opt_state, laid_out(moved.first), laid_out(moved.second), moved.updates
    )
    return TrainState(state.params, opt_state, jnp.int32(moved.updates), average), buffers


def restore(
    run: RunDirectory,
    like: Tree,
    start: tuple[TrainState, Tree],
    mesh: Mesh,
    stacked: bool,
) -> tuple[TrainState, Tree, LogWindow]:
    """What the run's newest checkpoint holds: the state in the layout of that at the start, the
    buffers, the window.

    Raises:
        InputError: there is no checkpoint, or it does not fit.
    """
    state, buffers = start
    expected = checkpoint_tree(state, LogWindow.empty())
    if stacked:
        expected = jax.eval_shape(lambda tree: to_canonical(tree, like), expected)
    expected |= {"buffers": buffers}
    with CheckpointStore(run.latest) as store:
        values = store.restore(on_device(expected, replicated(mesh)))
    window = LogWindow(**jax.device_get(values.pop("window")))
    buffers = values.pop("buffers")
    if stacked:
        values = map_params(stack_layers, values, like)
    return TrainState(**values), buffers, window


def checkpoint_tree(state: TrainState, window: LogWindow) -> Tree:
    """What a checkpoint holds beside the buffers: all that a run needs to go on exactly."""
    return state._asdict() | {"window": window._asdict()}


def to_canonical(tree: Tree, like: Tree) -> Tree:
    """Undo `stack_layers` in everything of `tree` that is shaped like the parameters."""
    return map_params(lambda part: unstack_layers(part, like), tree, like)


def map_params(function: Callable[[Tree], Tree], tree: Tree, like: Tree) -> Tree:
    """Apply `function` to each part of a training state that is a tree of parameters or moments:
    the nested dicts with the top level of `like`."""

    def is_params(node: object) -> bool:
        return isinstance(node, dict) and node.keys() == like.keys()

    return jax.tree.map(
        lambda node: function(node) if is_params(node) else node, tree, is_leaf=is_params
    )
