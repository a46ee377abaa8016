"""The optimizer in a training checkpoint of PyTorch: `Adam.state_dict()`, by name.

PyTorch has its state by index, in the order in which the optimizer was given the parameters. Their
names are, in this order of preference:

1. the keys themselves (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`);
2. `param_names` of the groups, which are there if it was given `model.named_parameters()`;
3. for one group, or one of matrices and one of all else: the order of the model's state dict.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import torch_file
from jax_transformer.porting.formats.base import Checkpoint, LazyTensor
from jax_transformer.porting.formats.torch_pickle import TensorReference
from jax_transformer.porting.operations import Shape
from jax_transformer.porting.optimizer import PREFIXES, AdamSettings, AdamState, Kind
from jax_transformer.porting.plan import INSIDE, WRAPPERS, Plan

KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
"""Where in a file the optimizer may be."""

AVERAGES = ("ema", "ema_state_dict", "model_ema", "ema_model")
"""Where the running average of the weights may be."""

STEPS = ("step", "global_step", "iteration", "iter_num")
"""Where the number of updates may be, besides in the optimizer itself."""

BESIDE = "optimizer.pt"
"""The file of the optimizer in a folder that the trainer of `transformers` saves."""

MOMENTS: Mapping[str, Kind] = {"exp_avg": "first", "exp_avg_sq": "second"}


@dataclasses.dataclass(frozen=True)
class Slot:
    """A parameter of the optimizer: its group, and what the optimizer holds of it."""

    key: Any
    group: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def shape(self) -> Shape:
        """Of the parameter."""
        return tuple(self.state["exp_avg"].shape)


def has_optimizer(checkpoint: Checkpoint) -> bool:
    """Whether there is one."""
    return any(key in checkpoint.metadata for key in KEYS) or beside(checkpoint).is_file()


def beside(checkpoint: Checkpoint) -> Path:
    """The file of the optimizer in a folder."""
    return checkpoint.path / BESIDE


def read(
    checkpoint: Checkpoint,
    plan: Plan,
    parameters: Sequence[str] | None,
    shapes: Mapping[str, Shape],
) -> tuple[AdamState, tuple[str, ...]]:
    """The state of Adam, by the names of the file; and these, in the order of the optimizer.

    Args:
        checkpoint: of PyTorch's names.
        plan: of its weights, to ours.
        parameters: the names of its parameters in the order of the model; None: not known.
        shapes: of our parameters.

    Raises:
        InputError: it is not Adam or AdamW, or an Adam that is not built here; parameters that
            cannot be named; parameters with different settings or numbers of updates.
    """
    place, content = locate(checkpoint)
    slots = slots_of(content, place)
    named = dict(zip(names_of(slots, checkpoint, parameters, place), slots, strict=True))
    if len(named) < len(slots):
        raise InputError(f"{place}: two of its parameters have one name")
    tensors: dict[Kind, Mapping[str, LazyTensor]] = {
        kind: {name: slot.state[moment] for name, slot in named.items()}
        for moment, kind in MOMENTS.items()
    }
    if average := average_of(checkpoint, plan, shapes):
        tensors["average"] = average
    updates = int(same(place, "step", {name: slot.state["step"] for name, slot in named.items()}))
    settings, notes = settings_of(place, named, plan, shapes)
    for key in STEPS:
        stated = checkpoint.metadata.get(key)
        if isinstance(stated, int) and stated != updates:
            notes += (f"{key} is {stated}, but Adam has made {updates} updates: those count",)
    state = AdamState(tensors=tensors, updates=updates, settings=settings, notes=notes)
    return state, tuple(named)


def locate(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]]:
    """Where the optimizer is, for messages, and what it holds.

    Raises:
        InputError: it is nowhere, or no optimizer's `state_dict()`.
    """
    path = checkpoint.path
    key = next((key for key in KEYS if key in checkpoint.metadata), None)
    if key is not None:
        place, content = f"{path}: {key}", checkpoint.metadata[key]
    else:
        place, content = str(beside(checkpoint)), torch_file.load(beside(checkpoint))
    if isinstance(content, list | tuple) and len(content) == 1:
        (content,) = content
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        raise InputError(f"{place} is no optimizer: save optimizer.state_dict()")
    return place, content


def slots_of(content: Mapping[str, Any], place: str) -> list[Slot]:
    """The parameters in order, each with the state of Adam.

    Raises:
        InputError: another optimizer, or a parameter that it has not updated yet.
    """
    keys = [(key, group) for group in content["param_groups"] for key in group["params"]]
    slots = [Slot(key, group, content["state"].get(key, {})) for key, group in keys]
    for slot in slots:
        name = name_in_group(slot)
        if not slot.state:
            raise InputError(
                f"{place} has no state of parameter {name}: all are trained here, so each must "
                f"have had an update there"
            )
        if unknown := slot.state.keys() - {"step", *MOMENTS}:
            raise InputError(
                f"{place}: parameter {name} has {', '.join(sorted(unknown))}: only Adam and AdamW "
                f"are carried, without amsgrad"
            )
        if missing := {"step", *MOMENTS} - slot.state.keys():
            raise InputError(f"{place}: parameter {name} lacks {', '.join(sorted(missing))}")
        if not isinstance(slot.state["exp_avg"], LazyTensor):
            raise InputError(f"{place}: exp_avg of parameter {name} is no tensor")
    if not slots:
        raise InputError(f"{place} has no parameter")
    return slots


def name_in_group(slot: Slot) -> Any:
    """The name that the group has for a parameter, else its key."""
    names = slot.group.get("param_names")
    return names[list(slot.group["params"]).index(slot.key)] if names else slot.key


def names_of(
    slots: Sequence[Slot], checkpoint: Checkpoint, parameters: Sequence[str] | None, place: str
) -> list[str]:
    """The name of each parameter in the file, see the head of this module.

    Raises:
        InputError: nothing says them, or they are not those of the model.
    """
    stated = [name_in_group(slot) for slot in slots]
    if all(isinstance(name, str) for name in stated):
        known = {plain(name): name for name in checkpoint.tensors}
        lost = [name for name in stated if plain(name) not in known]
        if lost:
            raise InputError(f"{place}: {', '.join(lost[:5])}: the model has no such tensor")
        return [known[plain(name)] for name in stated]
    remedy = (
        "give the optimizer model.named_parameters() in place of model.parameters(), which "
        "PyTorch 2.6 saves the names of"
    )
    if parameters is None:
        raise InputError(f"{place} does not name its parameters: {remedy}")
    if len(parameters) != len(slots):
        raise InputError(
            f"{place} has {len(slots)} parameters and does not name them, the model has "
            f"{len(parameters)}: {remedy}"
        )
    groups = list({id(slot.group): slot.group for slot in slots}.values())
    if len(groups) == 1:
        return list(parameters)
    kinds = [{len(slot.shape) >= 2 for slot in slots if slot.group is group} for group in groups]
    if kinds not in ([{True}, {False}], [{False}, {True}]):
        raise InputError(
            f"{place} has {len(groups)} groups and does not name what is in them: {remedy}"
        )
    left: dict[bool, list[str]] = {True: [], False: []}
    for name in reversed(parameters):
        left[len(checkpoint.tensors[name].shape) >= 2].append(name)
    if len(left[True]) != sum(len(slot.shape) >= 2 for slot in slots):
        raise InputError(f"{place} has other shapes than the model: {remedy}")
    return [left[len(slot.shape) >= 2].pop() for slot in slots]


def plain(name: str) -> str:
    """A name without what torch.compile, FSDP and DataParallel put into it."""
    for inside in INSIDE:
        name = name.replace(inside, "")
    while name.startswith(WRAPPERS[0]):
        name = name.removeprefix(WRAPPERS[0])
    return name


def settings_of(
    place: str, named: Mapping[str, Slot], plan: Plan, shapes: Mapping[str, Shape]
) -> tuple[AdamSettings, tuple[str, ...]]:
    """The hyperparameters, and what was taken for granted of them.

    Raises:
        InputError: ones that differ by parameter, or that are not built here.
    """

    def all_of(key: str) -> dict[str, Any]:
        return {name: slot.group.get(key) for name, slot in named.items()}

    for key, why in (
        ("amsgrad", "the maximum of second moments is not kept here"),
        ("maximize", "only losses are minimised here"),
    ):
        if any(value for value in all_of(key).values()):
            raise InputError(f"{place}: {key}=True: {why}")
    betas = same(place, "betas", all_of("betas"))
    decay = decay_of(place, {name: float(number(v)) for name, v in all_of("weight_decay").items()},
                     plan, shapes)  # fmt: skip
    decoupled = set(all_of("decoupled_weight_decay").values())
    if decay and False in decoupled:
        raise InputError(
            f"{place}: weight_decay={decay} of Adam passes through the moments, that of AdamW, "
            f"which is built here, does not: train with AdamW"
        )
    notes = (
        (f"weight_decay={decay} is taken as that of AdamW: the file does not say it",)
        if decay and None in decoupled
        else ()
    )
    return AdamSettings(
        b1=float(number(betas[0])),
        b2=float(number(betas[1])),
        eps=float(same(place, "eps", all_of("eps"))),
        weight_decay=decay,
        learning_rate=float(same(place, "lr", all_of("lr"))),
    ), notes


def decay_of(
    place: str, decays: Mapping[str, float], plan: Plan, shapes: Mapping[str, Shape]
) -> float:
    """The weight decay of matrices.

    Raises:
        InputError: it differs between them, or falls on anything else.
    """
    seconds = {second: of for second, of in plan.tied.items()}
    matrices = {
        name: len(shapes[move.targets[0]]) >= 2
        for move in plan.moves
        if move.targets[0] in shapes
        for name in move.sources
    }
    of_matrices: dict[str, float] = {}
    for name, decay in decays.items():
        if matrices.get(name, matrices.get(seconds.get(name, ""), True)):
            of_matrices[name] = decay
        elif decay:
            raise InputError(
                f"{place}: weight_decay={decay} falls on {name}: here it falls on matrices alone, "
                f"not on biases and norms; give these a group of their own with weight_decay=0"
            )
    return float(same(place, "weight_decay", of_matrices))


def same(place: str, key: str, values: Mapping[str, Any]) -> Any:
    """The one value that all parameters have.

    Raises:
        InputError: they differ, or one has none.
    """
    found = {name: number(value) for name, value in values.items()}
    first, *others = found
    other = next((name for name in others if found[name] != found[first]), None)
    if other is not None:
        raise InputError(
            f"{place}: {key} is {found[first]} of {first}, but {found[other]} of {other}: here it "
            f"is one for all parameters"
        )
    if found[first] is None:
        raise InputError(f"{place}: {key} is missing")
    return found[first]


def number(value: Any) -> Any:
    """A number that may be held in a tensor."""
    return value.read().item() if isinstance(value, LazyTensor) else value


def average_of(
    checkpoint: Checkpoint, plan: Plan, shapes: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """The running average of the weights, by the names of the weights; empty if there is none.

    Raises:
        InputError: it has not the tensors of the model.
    """
    key = next((key for key in AVERAGES if key in checkpoint.metadata), None)
    if key is None:
        return {}
    content = checkpoint.metadata[key]
    if not isinstance(content, dict):
        raise InputError(f"{checkpoint.path}: {key} is no state dict")
    held = {plain(name): tensor for name, tensor in content.items() if isinstance(name, str)}
    trained = [move for move in plan.moves if move.targets[0] in shapes]
    names = [name for move in trained for name in move.sources]
    missing = [name for name in names if not isinstance(held.get(plain(name)), LazyTensor)]
    if missing:
        raise InputError(f"{checkpoint.path}: {key} lacks {', '.join(missing[:5])}")
    return {name: held[plain(name)] for name in names}


def arrange(
    references: Mapping[str, TensorReference],
    *,
    updates: int,
    settings: AdamSettings,
    groups: Sequence[tuple[float, Mapping[str, str]]],
    names: Mapping[str, str],
    by_index: bool,
) -> dict[str, Any]:
    """What a training checkpoint holds: `model`, `optimizer`, `step`, and `ema` if there is one.

    The keys of the optimizer's state are names: `torch.distributed.checkpoint.state_dict.
    set_optimizer_state_dict` goes by them. `Optimizer.load_state_dict` goes by the place, and at no
    shape: where ours are not in PyTorch's order, an empty group makes it refuse.

    Args:
        references: by the names of `optimizer.with_moments`.
        updates, settings: of Adam.
        groups: weight decay, and the parameters that have it: name in PyTorch -> name in
            `references`.
        names: of the state dict, in order, likewise; a tied table is there under each of its own.
        by_index: whether the groups are in the order in which the model in PyTorch has them.
    """
    prefixes = PREFIXES["pt"]
    average = {name: references.get(prefixes["average"] + of) for name, of in names.items()}
    common = {
        "lr": settings.learning_rate,
        "betas": (settings.b1, settings.b2),
        "eps": settings.eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": settings.weight_decay > 0.0,
    }
    state = {
        name: {"step": float(updates)}
        | {moment: references[prefixes[kind] + of] for moment, kind in MOMENTS.items()}
        for _, parameters in groups
        for name, of in parameters.items()
    }
    listed = [*groups, *([] if by_index else [(0.0, {})])]
    optimizer = {
        "state": state,
        "param_groups": [
            common | {"weight_decay": decay, "params": list(parameters)}
            for decay, parameters in listed
        ],
    }
    held = {
        name: reference or references[names[name]] for name, reference in average.items()
    }  # A buffer has no average.
    return {
        "model": collections.OrderedDict((name, references[of]) for name, of in names.items()),
        "optimizer": optimizer,
        "step": updates,
        **({"ema": collections.OrderedDict(held)} if any(average.values()) else {}),
    }
