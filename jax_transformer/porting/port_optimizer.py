"""`port --with-optimizer`: Adam's moments, updates and settings go where the weights go.

Between the newest checkpoint of a run (or of a ported directory) and a training checkpoint of
PyTorch, `{"model": ..., "optimizer": ..., "step": ...}`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.families.base import Config
from jax_transformer.porting.formats import torch_file, torch_optimizer
from jax_transformer.porting.formats.base import MANIFEST, Checkpoint, LazyTensor, read_json
from jax_transformer.porting.identify import OWN, Identified, buffer_names, layout, skeleton
from jax_transformer.porting.operations import Shape
from jax_transformer.porting.optimizer import AdamState, with_moments
from jax_transformer.porting.plan import Plan
from jax_transformer.porting.rules import Alias, bind
from jax_transformer.porting.stream import cast_dtype

PARAMETERS = "parameters"
"""In a manifest: the parameters in the order of the optimizer in PyTorch that they came from."""


class Moments(NamedTuple):
    """What `--with-optimizer` adds to a port."""

    plan: Plan
    tensors: Mapping[str, LazyTensor]
    options: dict[str, Any]
    """Of the writer."""
    about: dict[str, Any]
    notes: tuple[str, ...]


def check_formats(checkpoint: Checkpoint, to: str) -> None:
    """Refuse what no optimizer can be carried between.

    Raises:
        InputError: a format that has none, or twice the same one.
    """
    source = "orbax" if checkpoint.format == OWN else "pt"
    if to not in ("orbax", "pt"):
        raise InputError(
            f"--with-optimizer: the format {to} has no place for an optimizer: give a destination "
            f"that ends in .pt"
        )
    if source == to:
        raise InputError(
            f"--with-optimizer goes between our directories and PyTorch's files: {checkpoint.path} "
            f"is {'one of ours' if to == 'orbax' else 'of PyTorch'} already, copy it"
        )


def moments_of(
    model: Identified, plan: Plan, config: Mapping[str, Any], dtype: np.dtype | None
) -> Moments:
    """What is to be added to the plan of the weights, from or to one of our directories.

    Args:
        model: in the source.
        plan: of its weights.
        config: that the directory has without an optimizer.
        dtype: of the floating-point tensors written; None: each keeps its own.

    Raises:
        InputError: there is no optimizer, or one that cannot be carried.
    """
    if model.checkpoint.format == OWN:
        return to_torch(model, plan)
    return to_ours(model, plan, config, dtype)


def to_torch(model: Identified, plan: Plan) -> Moments:
    """Into a training checkpoint of PyTorch."""
    checkpoint, buffers = model.checkpoint, buffer_names(model.config)
    state, _ = state_of(model, plan)
    # Second names of tied tables refer to the same numbers, as in PyTorch's own files.
    whole, tensors = whole_plan(model, dataclasses.replace(plan, copies={}), state, to="pt")
    targets = {target: move for move in plan.moves for target in move.targets}
    rules = layout(model.family, "pt").rules(model.config)
    seconds = {rule.source: rule.of for rule in rules if isinstance(rule, Alias)}
    names = {name: name for name in targets}
    names |= {second: of for second, of in seconds.items() if of in targets}
    trained = [name for name, of in names.items() if not set(targets[of].sources) & set(buffers)]
    order = order_of(model, trained)
    first: dict[str, str] = {}  # Of a tied table the name that comes first.
    for name in order or trained:
        first.setdefault(names[name], name)
    groups: dict[float, dict[str, str]] = {}
    for of, name in first.items():
        (shape, *_) = (checkpoint.tensors[source].shape for source in targets[of].sources)
        decay = state.settings.weight_decay if len(shape) >= 2 else 0.0
        groups.setdefault(decay, {})[name] = of
    arrange = functools.partial(
        torch_optimizer.arrange,
        updates=state.updates,
        settings=state.settings,
        groups=list(groups.items()),
        names={name: names[name] for name in (*(order or ()), *names)},
        by_index=order is not None,
    )
    notes = () if order is not None else (BY_NAME,)
    return Moments(whole, tensors, {"arrange": arrange}, {}, notes)


def state_of(model: Identified, plan: Plan) -> tuple[AdamState, tuple[str, ...]]:
    """The optimizer of a checkpoint, and its parameters in its order (of ours: none).

    Raises:
        InputError: there is none, or one that cannot be carried.
    """
    checkpoint = model.checkpoint
    if checkpoint.format == OWN:
        from jax_transformer.porting.formats import orbax_state  # Orbax takes seconds to import.

        if orbax_state.has_optimizer(checkpoint):
            return orbax_state.read(checkpoint, model.config), ()
    elif torch_optimizer.has_optimizer(checkpoint):
        parameters = parameters_of(model, plan, buffer_names(model.config))
        return torch_optimizer.read(checkpoint, plan, parameters, param_shapes(model.config))
    raise InputError(
        f"{checkpoint.path} holds no optimizer: a run has it in checkpoints/latest, a file of "
        f"PyTorch under {' or '.join(torch_optimizer.KEYS[:2])}; leave --with-optimizer out"
    )


BY_NAME = (
    "load the optimizer with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, "
    "which goes by name: the order of the parameters in PyTorch is not known here"
)


def to_ours(
    model: Identified, plan: Plan, config: Mapping[str, Any], dtype: np.dtype | None
) -> Moments:
    """Into a directory of ours: a run to be resumed, if the source's config is that of a run."""
    from jax_transformer.porting.formats import orbax_state

    checkpoint = model.checkpoint
    state, order = state_of(model, plan)
    held = (*checkpoint.tensors.values(), *state.tensors["first"].values())
    dtypes = {cast_dtype(tensor.dtype, dtype) for tensor in held}
    files: dict[str, str] = {}
    notes = state.notes
    run = orbax_state.run_config(checkpoint.config, str(checkpoint.path))
    if run is None:
        config = {**config, "optimizer": dataclasses.asdict(state.settings)}
    else:
        notes += orbax_state.check_run(run, state, model, dtypes)
        state, more = orbax_state.with_average(run, state, checkpoint.tensors)
        notes += more
        config, files = checkpoint.config, {"metrics.jsonl": ""}
    whole, tensors = whole_plan(model, plan, state)
    tree = orbax_state.tree(state, model.config, dtypes)
    options = {"state": (state.updates, tree), "files": files, "config": config}
    return Moments(whole, tensors, options, {PARAMETERS: list(order)}, notes)


def whole_plan(
    model: Identified, plan: Plan, state: AdamState, to: str = OWN
) -> tuple[Plan, dict[str, LazyTensor]]:
    """The plan of weights and moments, and its tensors.

    Raises:
        InputError: as `with_moments`.
    """
    source = OWN if model.checkpoint.format == OWN else "pt"
    return with_moments(
        plan,
        model.checkpoint.tensors,
        state,
        source=source,
        target=to,
        buffers=buffer_names(model.config),
    )


def parameters_of(model: Identified, plan: Plan, buffers: Sequence[str]) -> tuple[str, ...] | None:
    """The parameters of a checkpoint of PyTorch in the order in which its model has them; None:
    not known. Of a tied table the first name."""
    trained = {
        name for move in plan.moves if not set(move.targets) & set(buffers) for name in move.sources
    }
    seen: set[str] = set()
    names = []
    for name in model.checkpoint.tensors:
        table = plan.tied.get(name, name)
        if table in trained and table not in seen:
            seen.add(table)
            names.append(name)
    # A state dict of PyTorch is in this order, a file of safetensors in that of the alphabet.
    is_torch = model.checkpoint.format == torch_file.FORMAT
    return tuple(names) if is_torch else registered(model.family.order, names)


def order_of(model: Identified, names: Sequence[str]) -> tuple[str, ...] | None:
    """Names of parameters in PyTorch, in the order of the optimizer there; None: not known."""
    manifest = model.checkpoint.path / MANIFEST
    before = read_json(manifest).get(PARAMETERS) if manifest.is_file() else None
    if before is not None and set(before) <= set(names):
        return tuple(before)
    return registered(model.family.order, names)


def registered(order: Sequence[str], names: Sequence[str]) -> tuple[str, ...] | None:
    """Names in the order in which a class with the modules of `Family.order` registers them; None:
    one is of no such module."""
    places = {name: place_of(order, name) for name in names}
    if None in places.values():
        return None
    return tuple(sorted(names, key=lambda name: places[name] or ()))


def place_of(order: Sequence[str], name: str) -> tuple[int, int, int, bool] | None:
    """Where a name comes: its first module, the layer, the module in that, weight before bias."""
    module, _, leaf = name.rpartition(".")
    for number, pattern in enumerate(order):
        parts = bind(pattern, module)
        if parts is not None:
            stem = pattern.partition("{")[0]
            first = next(i for i, other in enumerate(order) if other.partition("{")[0] == stem)
            return first, int(parts.get("i", 0)), number, leaf == "bias"
    return None


def param_shapes(config: Config) -> dict[str, Shape]:
    """The shapes of what is trained, by our names."""
    from jax_transformer.models.parameters import flatten

    return {name: tuple(leaf.shape) for name, leaf in flatten(skeleton(config)[1]).items()}
