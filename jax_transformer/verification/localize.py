"""Which module is the first to differ when each is given what the reference gave its own.

Every captured value is compared and then replaced by the reference's: what a module computes never
depends on a fault elsewhere. Backwards, the same is done with the gradients at these values.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer.models.parameters import flatten
from jax_transformer.verification.capture import (
    Call,
    Record,
    first,
    intercepted,
    module_of,
    parent_of,
    with_first,
)
from jax_transformer.verification.compare import SAME_FUNCTION, relative_error

Run = Callable[[nnx.Module], jax.Array]


@dataclasses.dataclass(frozen=True)
class FedCall:
    """A call of one of our modules with the reference's inputs."""

    module: nnx.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of feeding our side with the reference's values."""

    errors: dict[str, float]
    """Relative error at each point that both sides have, in our order."""
    calls: dict[str, FedCall]
    """By name of the call."""
    only_ours: tuple[str, ...]
    """Points that the reference lacks."""
    only_theirs: tuple[str, ...]

    def first_fault(self, tolerance: float = SAME_FUNCTION) -> str | None:
        """The first point that differs."""
        return next((p for p, error in self.errors.items() if not error <= tolerance), None)


class Disagreement(Exception):
    """A point that differs and may not."""

    def __init__(self, point: str):
        super().__init__(point)
        self.point = point


def culprit(point: str) -> str:
    """The module that computed a value: of what comes out of a module the module itself, of what
    goes into it the one around it."""
    module = module_of(point)
    return module if point.endswith(":out") else parent_of(module)


def compare_forward(
    model: nnx.Module,
    run: Run,
    reference: Record,
    valid: np.ndarray | None = None,
    *,
    place: str = "",
    excused: Collection[str] | None = None,
) -> tuple[Any, Comparison]:
    """The result of `run(model)` with every value replaced, and the errors.

    Args:
        valid: `[B, T]`, the tokens that count.
        place: where `model` sits in the one that the reference is of (see `intercepted`).
        excused: points that may differ; at any other that does the run ends. None: all may.

    Raises:
        Disagreement: at a point that may not differ.
    """
    errors: dict[str, float] = {}
    calls: dict[str, FedCall] = {}
    seen: list[str] = []

    def check(point: str, value: Any) -> Any:
        seen.append(point)
        expected = reference.points.get(point)
        if expected is None:
            return value
        error = errors[point] = relative_error(value, expected, valid)
        if excused is not None and point not in excused and not error <= SAME_FUNCTION:
            raise Disagreement(point)
        if np.size(value) != expected.size:
            return value
        return jnp.asarray(expected, value.dtype).reshape(value.shape)

    def handle(
        name: str, module: nnx.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args = with_input(args, lambda value: check(f"{name}:in", value))
        calls[name] = FedCall(module, args, kwargs)
        result = call(*args, **kwargs)
        return with_first(result, check(f"{name}:out", first(result)))

    with intercepted(model, handle, place=place):
        result = run(model)
        if f"{place}:out" in reference.points:
            check(f"{place}:out", first(result))
    return result, Comparison(
        errors,
        calls,
        tuple(point for point in seen if point not in reference.points),
        tuple(point for point in reference.points if point not in seen),
    )


def with_input(args: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments of a call with its input changed: the first, wherever it is given (attention
    takes it as query, key and value)."""
    if not args or args[0] is None:
        return args
    changed = change(args[0])
    return tuple(changed if value is args[0] else value for value in args)


@jax.custom_vjp
def tap(value: jax.Array, zero: jax.Array, shown: jax.Array, gradient: jax.Array) -> jax.Array:
    """`shown` in place of `value`; backwards, `value` gets `gradient` in place of its own, which
    goes to `zero`."""
    return shown


def _tap_forward(
    value: jax.Array, zero: jax.Array, shown: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return shown, gradient


def _tap_backward(gradient: jax.Array, own: jax.Array) -> tuple[Any, ...]:
    nothing = jnp.zeros_like(gradient)
    return gradient, own, nothing, nothing


tap.defvjp(_tap_forward, _tap_backward)


def compare_backward(
    model: nnx.Module, loss: Run, reference: Record, valid: np.ndarray | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the gradients at the points, from the loss backwards, and of the parameters'.

    Each module is given the reference's values forwards and its gradients backwards.
    """
    wanted = {
        point: jnp.asarray(gradient)
        for point, gradient in reference.gradients.items()
        if point in reference.points
    }
    zeros = {point: jnp.zeros_like(gradient) for point, gradient in wanted.items()}
    passed: set[str] = set()  # the reference may have points that ours lacks
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def total(params: Any, zeros: dict[str, jax.Array]) -> jax.Array:
        def check(point: str, value: Any) -> Any:
            if point not in wanted or value.size != wanted[point].size:
                return value
            passed.add(point)
            shown, gradient = (
                jnp.asarray(each[point], value.dtype).reshape(value.shape)
                for each in (reference.points, wanted)
            )
            return tap(value, zeros[point].reshape(value.shape), shown, gradient)

        def handle(
            name: str, module: nnx.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            args = with_input(args, lambda value: check(f"{name}:in", value))
            result = call(*args, **kwargs)
            return with_first(result, check(f"{name}:out", first(result)))

        merged = nnx.merge(graphdef, params, rest)
        with intercepted(merged, handle):
            return loss(merged)

    of_params, of_points = jax.grad(total, argnums=(0, 1))(params, zeros)
    errors = {
        point: relative_error(of_points[point], wanted[point], valid)
        for point in reversed(list(wanted))
        if point in passed
    }
    leaves = flatten(nnx.to_pure_dict(of_params))
    parameters = {
        name: relative_error(leaves[name], gradient)
        for name, gradient in reference.parameters.items()
        if name in leaves
    }
    return errors, parameters
