"""The state of Adam in the newest checkpoint of a run, and of a ported directory that has one.

Both have the tree of `training.setup.checkpoint_tree` and the buffers. The hyperparameters are in
`config.json`: among the settings of a run, or under "optimizer".
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_transformer.config import from_dict
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import split
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.formats.base import Checkpoint, LazyTensor
from jax_transformer.porting.identify import Identified, buffer_names, make_model, skeleton
from jax_transformer.porting.optimizer import AdamSettings, AdamState, Kind
from jax_transformer.training.config import TrainConfig
from jax_transformer.training.language_config import LanguageConfig
from jax_transformer.training.optimizer import adam
from jax_transformer.training.run import width_of
from jax_transformer.training.settings import RunConfig, settings_from
from jax_transformer.training.setup import checkpoint_tree, make_schedule
from jax_transformer.training.step import TrainState
from jax_transformer.training.window import LogWindow

RUNS: Mapping[str, type[RunConfig]] = {"translation": TrainConfig, "language": LanguageConfig}
"""Task -> its settings."""

LEAVES: Mapping[str, Kind] = {"mu": "first", "nu": "second"}


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether it is a checkpoint to go on from."""
    return "step" in checkpoint.metadata["rest"]


def read(checkpoint: Checkpoint, config: Config) -> AdamState:
    """The state of Adam, by our names.

    Args:
        checkpoint: read with `latest`.
        config: of its model.

    Raises:
        InputError: settings that are damaged.
    """
    tensors: dict[Kind, dict[str, LazyTensor]] = {"first": {}, "second": {}}
    for name, tensor in checkpoint.metadata["rest"].items():
        match name.split("."):
            case ["opt_state", _, ("mu" | "nu") as leaf, *rest]:
                tensors[LEAVES[leaf]][".".join(rest)] = tensor
            case ["average", *rest]:
                tensors.setdefault("average", {})[".".join(rest)] = tensor
    updates = int(checkpoint.metadata["rest"]["step"].read())
    settings = settings_of(checkpoint, config, updates)
    return AdamState(tensors=dict(tensors), updates=updates, settings=settings)


def settings_of(checkpoint: Checkpoint, config: Config, updates: int) -> AdamSettings:
    """The hyperparameters: of a run, those that it was told.

    Raises:
        InputError: they are damaged.
    """
    place = f"{checkpoint.path}/config.json"
    run = run_config(checkpoint.config, place)
    if run is None:
        values = checkpoint.config.get("optimizer")
        return from_dict(AdamSettings, values, place=f"{place}: optimizer")
    told = run.optimizer
    return AdamSettings(
        b1=told.b1,
        b2=told.b2,
        eps=told.eps,
        weight_decay=told.weight_decay,
        learning_rate=float(np.asarray(make_schedule(run, width_of(config))(updates))),
    )


def run_config(values: Mapping[str, Any], place: str) -> RunConfig | None:
    """The settings of the run that a `config.json` is of; None: it is of no run.

    Raises:
        InputError: they are damaged.
    """
    if values.get("task") not in RUNS or "training" not in values:
        return None
    return settings_from(RUNS[values["task"]], values["training"], place=f"{place}: training")


def tree(state: AdamState, config: Config, dtypes: Collection[np.dtype]) -> Any:
    """The tree of a newest checkpoint, with the names of `optimizer.with_moments` for tensors.

    Args:
        state: of Adam.
        config: of the model.
        dtypes: of the parameters.
    """
    _, params, buffers = skeleton(config)
    if buffers and not buffer_names(config):  # no file has them
        made = jax.device_get(jax.jit(lambda: split(make_model(config))[2])())
    else:
        made = named(buffers)
    updates = jnp.int32(state.updates)
    optimizer = adam(lambda count: 0.0, weight_decay=state.settings.weight_decay)
    opt_state = optax.tree_utils.tree_set(
        jax.eval_shape(optimizer.init, params),
        mu=named(params, "mu."),
        nu=named(params, "nu."),
        count=updates,
        gradient_norm=np.zeros((), np.float64 if np.float64 in dtypes else np.float32),
    )
    average = named(params, "average.") if "average" in state.tensors else None
    train_state = TrainState(named(params), opt_state, updates, average)
    return checkpoint_tree(train_state, LogWindow.empty()) | {"buffers": made}


def named(tree: Any, before: str = "") -> Any:
    """A tree with the names of its leaves for leaves."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: before + jax.tree_util.keystr(path, simple=True, separator="."), tree
    )


def check_run(
    run: RunConfig, state: AdamState, model: Identified, dtypes: Collection[np.dtype]
) -> tuple[str, ...]:
    """Refuse to make a run of what is not as its settings say; what is worth a word.

    Raises:
        InputError: hyperparameters that differ, a dtype that is not float32, no tokenizer.
    """
    path = model.checkpoint.path
    for name in ("b1", "b2", "eps", "weight_decay"):
        found, expected = getattr(state.settings, name), getattr(run.optimizer, name)
        if found != expected:
            raise InputError(
                f"{path}: its optimizer has {name}={found}, the run that its config is of "
                f"{expected}: train with the settings of the run, or change them in the config"
            )
    if set(dtypes) != {np.dtype(np.float32)}:
        found = " and ".join(sorted(map(str, dtypes)))
        raise InputError(f"{path} is in {found}, a run in float32: give --dtype float32")
    if "tokenizer.json" not in [file.name for file in model.checkpoint.companions]:
        raise InputError(f"{path}: a run needs its tokenizer.json: copy it beside the file")
    notes = []
    schedule = make_schedule(run, width_of(model.config))
    now, before = (float(np.asarray(schedule(max(0, state.updates - i)))) for i in (0, 1))
    rate = state.settings.learning_rate
    if not np.isclose(rate, (now, before), rtol=1e-5).any():
        notes.append(f"its learning rate is {rate:.3g}, the run's schedule goes on with {now:.3g}")
    return tuple(notes)


def with_average(
    run: RunConfig, state: AdamState, weights: Mapping[str, LazyTensor]
) -> tuple[AdamState, tuple[str, ...]]:
    """The state with a running average of the weights where the run keeps one, and only there."""
    average = state.tensors.get("average")
    tensors = {kind: held for kind, held in state.tensors.items() if kind != "average"}
    if run.optimizer.average_decay == 0.0:
        notes = () if average is None else ("the run keeps no running average: it is left out",)
        return dataclasses.replace(state, tensors=tensors), notes
    if average is None:
        average = {name: weights[name] for name in state.tensors["first"]}
        notes = ("there is no running average of the weights: it starts at the weights",)
        return dataclasses.replace(state, tensors=tensors | {"average": average}), notes
    return state, ()
