"""Every call of every module, on both sides under the same names.

A *point* is what goes into a module or comes out of it: `layers.0.norm1:in`, `layers.0.norm1:out`
(of a second call of the same module `embedding#2:out`). Points are in the order in which the
values are there: all that a value is computed from comes before it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from flax import nnx

Call = Callable[..., Any]
Handler = Callable[[str, nnx.Module, Call, tuple[Any, ...], dict[str, Any]], Any]


@dataclasses.dataclass
class Record:
    """What one run of one side leaves."""

    points: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Values, in order."""
    gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Of the loss with respect to the values, at the same points."""
    parameters: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Gradients of parameters, under the names of the JAX side."""


class Names:
    """Names of calls: the module's own the first time, then with `#2`, `#3`, ...; `start` is the
    number of the first call."""

    def __init__(self, start: int = 1) -> None:
        self._start = start
        self._calls: dict[str, int] = {}

    def next(self, module: str) -> str:
        """The name of the next call of `module`."""
        count = self._calls[module] = self._calls.get(module, self._start - 1) + 1
        return module if count == 1 else f"{module}#{count}"


def module_of(point: str) -> str:
    """`layers.0.norm1#2:out -> layers.0.norm1`."""
    return point.rpartition(":")[0].partition("#")[0]


def parent_of(module: str) -> str:
    """`layers.0.norm1 -> layers.0`; of the outermost modules the model itself, `""`."""
    return module.rpartition(".")[0]


def first(value: Any) -> Any:
    """The value of a point: of several outputs the first."""
    return value[0] if isinstance(value, tuple | list) else value


def with_first(value: Any, new: Any) -> Any:
    """`value` with `new` in the place of its first part."""
    return (new, *value[1:]) if isinstance(value, tuple) else new


@contextlib.contextmanager
def intercepted(model: nnx.Module, handle: Handler, *, place: str = "") -> Generator[None]:
    """Inside, each call of a module in `model` (but of `model` itself) is
    `handle(name, module, call, args, kwargs)`, which calls `call(*args, **kwargs)` in its own time.

    Args:
        place: where `model` sits in a larger one; of its name and number of the call.
    """
    outer, _, number = place.partition("#")
    paths = {
        id(module): ".".join([*filter(None, [outer]), *map(str, path)])
        for path, module in nnx.iter_modules(model)
        if path
    }
    names = Names(int(number or 1))
    running: list[int] = []

    def wrap(original: Call) -> Call:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            # A class that calls its base's __call__ is still the one module.
            if id(self) not in paths or (running and running[-1] == id(self)):
                return original(self, *args, **kwargs)
            running.append(id(self))
            try:
                bound = lambda *a, **k: original(self, *a, **k)  # noqa: E731
                return handle(names.next(paths[id(self)]), self, bound, args, kwargs)
            finally:
                running.pop()

        return call

    classes = {type(module) for _, module in nnx.iter_modules(model)}
    callers = {cls for cls in classes if "__call__" in dir(cls)}
    owners = {base for cls in callers for base in cls.__mro__ if "__call__" in vars(base)}
    owners = {cls for cls in owners if issubclass(cls, nnx.Module) and cls is not nnx.Module}
    before = {cls: vars(cls)["__call__"] for cls in owners}
    try:
        for cls in owners:
            setattr(cls, "__call__", wrap(before[cls]))  # noqa: B010
        yield
    finally:
        for cls in owners:
            setattr(cls, "__call__", before[cls])  # noqa: B010


@contextlib.contextmanager
def torch_points(model: Any, rename: Callable[[str], str | None]) -> Generator[dict[str, Any]]:
    """Inside, a run of the PyTorch `model` fills the dict with the tensors of its points.

    Args:
        rename: from the model's names of modules to those of the JAX side; None for modules that
            it does not have.
    """
    from torch import nn

    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    points: dict[str, Any] = {}
    names = Names()
    open_calls: list[str] = []

    def enter(name: str) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = names.next(name)
            open_calls.append(call)
            if not args or not hasattr(args[0], "detach"):
                return None
            # A tensor of its own: its gradient is what this module gives, and no other reader.
            own = points[f"{call}:in"] = args[0].view_as(args[0])
            return tuple(own if value is args[0] else value for value in args), kwargs

        return hook

    def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        points[f"{open_calls.pop()}:out"] = first(output)

    hooks = []
    for theirs, module in model.named_modules():
        name = rename(theirs) if theirs else None
        # A convolution of PyTorch has channels first, one of JAX last: what is around is compared.
        if name is not None and not isinstance(module, convolutions):
            hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield points
    finally:
        for hook in hooks:
            hook.remove()


def torch_record(
    model: Any, run: Callable[[], Any], rename: Callable[[str], str | None], *, backward: bool
) -> tuple[Any, Record]:
    """The loss or logits that `run()` gives, and what it leaves, as arrays; gradients with
    `backward`, of the scalar that `run()` gives."""
    import torch

    record = Record()
    with torch_points(model, rename) as points, torch.set_grad_enabled(backward):
        result = run()
    if backward:
        wanted = {n: p for n, p in points.items() if p.requires_grad and p.is_floating_point()}
        found = torch.autograd.grad(
            result, list(wanted.values()), allow_unused=True, retain_graph=True
        )
        for (name, point), gradient in zip(wanted.items(), found, strict=True):
            zero = torch.zeros_like(point)
            record.gradients[name] = as_numpy(zero if gradient is None else gradient)
    record.points = {name: as_numpy(point) for name, point in points.items()}
    return as_numpy(result), record


def as_numpy(tensor: Any) -> np.ndarray:
    """A tensor of PyTorch; narrow ones widened to float32, exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
