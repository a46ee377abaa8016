"""Ways to plant a fault in one side of a correct pair, the pair itself left as it is."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flax import nnx

from jax_transformer.verification.pair import Pair
from jax_transformer.verification.pairs import parameters

Plant = Callable[[Pair], Pair]
Change = Callable[[Any], Any]


def part(model: Any, path: str) -> Any:
    """The module at a dotted path."""
    for name in filter(None, path.split(".")):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def in_theirs(path: str, change: Callable[[Any], None]) -> Plant:
    """Change a module of the reference."""

    def plant(pair: Pair) -> Pair:
        theirs = copy.deepcopy(pair.theirs)
        change(part(theirs, path))
        return dataclasses.replace(pair, theirs=theirs)

    return plant


def setting(path: str, **values: Any) -> Plant:
    """Other settings of a module of the reference."""

    def change(module: Any) -> None:
        for name, value in values.items():
            setattr(module, name, value)

    return in_theirs(path, change)


def config(path: str, **values: Any) -> Plant:
    """Other fields in the config of a module of the reference."""

    def change(module: Any) -> None:
        module.config = dataclasses.replace(module.config, **values)

    return in_theirs(path, change)


def forward(path: str, function: Callable[..., Any]) -> Plant:
    """Another formula for a module of the reference: `function(module, *args, **kwargs)`."""

    def change(module: Any) -> None:
        base = type(module)
        body = {"forward": function, "__module__": base.__module__}
        module.__class__ = type(base.__name__, (base,), body)

    return in_theirs(path, change)


def output(path: str, change: Change) -> Plant:
    """Change what a module of the reference puts out."""

    def hook(module: Any, args: Any, result: Any) -> Any:
        return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

    return in_theirs(path, lambda module: module.register_forward_hook(hook))


def argument(path: str, index: int, name: str, change: Change) -> Plant:
    """Change an argument of a module of the reference, given by place or by name."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index < len(args):
            return (*args[:index], change(args[index]), *args[index + 1 :]), kwargs
        return args, kwargs | {name: change(kwargs.get(name))}

    return in_theirs(path, lambda module: module.register_forward_pre_hook(hook, with_kwargs=True))


def gradient(path: str) -> Plant:
    """The right values of a module, and nine tenths of their gradient."""
    return output(path, lambda out: out + 0.1 * (out.detach() - out))


def port(change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Plant:
    """Rules that make other parameters of the reference's: `change(all)` gives the changed ones.
    The reference's weights are known only through the same rules."""

    def plant(pair: Pair) -> Pair:
        changed = weights(change)(pair)
        theirs = {n: np.asarray(leaf, np.float64) for n, leaf in parameters(changed.ours).items()}
        return dataclasses.replace(changed, their_weights=theirs)

    return plant


def weights(change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Plant:
    """Parameters that became others after they were carried over rightly."""

    def plant(pair: Pair) -> Pair:
        ours = nnx.clone(pair.ours)
        arrays = {name: np.asarray(leaf) for name, leaf in parameters(ours).items()}
        for name, value in change(arrays).items():
            path, _, leaf = name.rpartition(".")
            parameter = getattr(part(ours, path), leaf)
            parameter[...] = np.asarray(value, arrays[name].dtype)
        return dataclasses.replace(pair, ours=ours)

    return plant


def both(*plants: Plant) -> Plant:
    """One after the other."""

    def plant(pair: Pair) -> Pair:
        for each in plants:
            pair = each(pair)
        return pair

    return plant


def mean_square_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """An RMSNorm in the place of a LayerNorm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.eps) * module.weight


def centred_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A LayerNorm in the place of an RMSNorm."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], module.weight, None, module.epsilon)
