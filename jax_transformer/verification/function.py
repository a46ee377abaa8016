"""A function of parameters in place of a module: code that is not written as `nnx.Module`s."""

import contextvars
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jax_transformer.errors import InputError

Visit = Callable[[str, Any], Any]

_visit: contextvars.ContextVar[Visit | None] = contextvars.ContextVar("visit", default=None)


def point(name: str, value: jax.Array) -> jax.Array:
    """`value`, under a name: the output of the part of the model that is called so.

    Inside a function that is compared (`compare_modules`) the value is compared with the output of
    the reference's module of that name, and what follows is computed from the reference's; anywhere
    else it is the identity.
    """
    visit = _visit.get()
    return value if visit is None else visit(name, value)


@contextmanager
def visited(visit: Visit) -> Generator[None]:
    """Inside, `point` is `visit`."""
    token = _visit.set(visit)
    try:
        yield
    finally:
        _visit.reset(token)


class Part(nnx.Module):
    """A name: it holds the parameters below it, and its call is a point."""

    def __call__(self, nothing: None, value: jax.Array) -> jax.Array:
        """`value`; its input is nothing that could be compared."""
        return value


class Function(nnx.Module):
    """`function(parameters, *inputs)` as a module whose points are its parts.

    Compiled parts of the function are run step by step, so that points have values. The modules
    of `flax.linen` are points by themselves, under their paths.

    Args:
        function: gives one array.
        parameters: any pytree, of arrays or of shapes; names are paths with dots.
        inputs: what it will be called with.

    Raises:
        InputError: two parameters of one name.
    """

    def __init__(self, function: Callable[..., Any], parameters: Any, inputs: tuple[Any, ...]):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(parameters)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(f"two parameters are called {double[0]}: rename one")
        self._function = function
        self._names = tuple(names)
        self._treedef = treedef
        for name, (_, leaf) in zip(names, leaves, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(self._part(owner, make=True), last, nnx.Param(leaf))
        for name in self._points(parameters, inputs):
            self._part(name, make=True)

    def __call__(self, *inputs: Any) -> jax.Array:
        """The function's result."""
        leaves = []
        for name in self._names:
            owner, _, last = name.rpartition(".")
            leaves.append(getattr(self._part(owner), last)[...])
        parameters = jax.tree_util.tree_unflatten(self._treedef, leaves)
        visit = lambda name, value: cast(Part, self._part(name))(None, value)  # noqa: E731
        with visited(visit), jax.disable_jit(), linen_points():
            return self._function(parameters, *inputs)

    def _part(self, name: str, *, make: bool = False) -> nnx.Module:
        """The part of a dotted name; the module itself of none."""
        part: nnx.Module = self
        for each in filter(None, name.split(".")):
            if make and not hasattr(part, each):
                setattr(part, each, Part())
            part = getattr(part, each)
        return part

    def _points(self, parameters: Any, inputs: tuple[Any, ...]) -> list[str]:
        """The names of the points, from a run without numbers."""
        found: list[str] = []

        def visit(name: str, value: Any) -> Any:
            found.append(name)
            return value

        with visited(visit), jax.disable_jit(), linen_points():
            jax.eval_shape(self._function, parameters, *inputs)
        return found


def linen_points() -> AbstractContextManager[None]:
    """Inside, modules of `flax.linen`, if it is in use, are points."""
    linen = sys.modules.get("flax.linen")
    return nullcontext() if linen is None else linen_calls(linen)


@contextmanager
def linen_calls(linen: Any) -> Generator[None]:
    """Inside, what `__call__` of a linen module gives goes through `point`."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        path = ".".join(context.module.path)
        named = path and context.method_name == "__call__" and hasattr(result, "shape")
        return point(path, result) if named else result

    with linen.intercept_methods(intercept):
        yield


def nested(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """`{"a.b": x} -> {"a": {"b": x}}`: the parameters of a function that come without a tree."""
    tree: dict[str, Any] = {}
    for name, value in weights.items():
        *owners, last = name.split(".")
        node = tree
        for owner in owners:
            node = node.setdefault(owner, {})
        node[last] = value
    return tree
