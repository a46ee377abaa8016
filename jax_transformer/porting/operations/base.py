"""What every operation has, and what is done with several of them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jax_transformer.errors import InputError

Shape = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]


class Operation(Protocol):
    """A change of layout of the tensors of a rule."""

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        """Source to target."""
        ...

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes that `apply_all` gives.

        Raises:
            InputError: shapes that it cannot be applied to.
        """
        ...

    def inverse(self) -> "Operation":
        """Target to source."""
        ...


class OneToOne:
    """An operation on one tensor; on several, the same for each."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Source to target."""
        raise NotImplementedError

    def shape(self, shape: Shape) -> Shape:
        """The shape that `apply` gives.

        Raises:
            InputError: a shape that it cannot be applied to.
        """
        raise NotImplementedError

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        return tuple(self.apply(array) for array in arrays)

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        return tuple(self.shape(shape) for shape in shapes)


def contiguous(array: np.ndarray) -> np.ndarray:
    """`array`, copied if it is a strided view."""
    return np.asarray(array, order="C")


def apply_all(operations: Sequence[Operation], arrays: Iterable[np.ndarray]) -> Arrays:
    """The operations of a rule, in order."""
    arrays = tuple(arrays)
    for operation in operations:
        arrays = operation.apply_all(arrays)
    return tuple(contiguous(array) for array in arrays)


def shapes_of(operations: Sequence[Operation], shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The shapes that the operations of a rule give.

    Raises:
        InputError: shapes that one of them cannot be applied to.
    """
    shapes = tuple(shapes)
    for operation in operations:
        shapes = operation.shapes(shapes)
    return shapes


def invert(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The way back."""
    return tuple(operation.inverse() for operation in reversed(operations))


def size_of_axis(shape: Shape, axis: int, operation: object) -> int:
    """The size of that axis.

    Raises:
        InputError: no such axis.
    """
    if not 0 <= axis < len(shape):
        raise InputError(f"{list(shape)} has no axis {axis} for {operation}")
    return shape[axis]


def replaced(shape: Shape, axis: int, *sizes: int) -> Shape:
    """`shape` with `sizes` in place of one axis."""
    return shape[:axis] + sizes + shape[axis + 1 :]


def only(values: Sequence, count: int, operation: object) -> Sequence:
    """`values`, which must be as many as the operation takes.

    Raises:
        InputError: more or fewer.
    """
    if len(values) != count:
        raise InputError(f"{operation} is for {count} tensors, not for {len(values)}")
    return values
