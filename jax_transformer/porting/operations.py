"""What a rule does to tensors: a change of layout, with its inverse and its shape rule.

Axes are counted in the array as it comes in. Every result is contiguous: some writers store the raw
memory of a strided view. No operation touches a number but `AddConstant`, and none a dtype.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import numpy as np

from jax_transformer.errors import InputError

BLOCK = 16
"""Rows of a matrix that are transposed at once."""

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


@dataclasses.dataclass(frozen=True)
class Transpose(OneToOne):
    """A matrix `[out, in]` (PyTorch's `nn.Linear`) as a kernel `[in, out]`, a convolution
    `[out, in, width]` as `[width, in, out]`: the axes in reverse order; its own inverse."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        if array.ndim != 2:
            return contiguous(array.T)
        # In blocks of rows, whose columns of the result stay in the cache: five times as fast.
        result = np.empty(array.shape[::-1], array.dtype)
        for start in range(0, array.shape[0], BLOCK):
            result[:, start : start + BLOCK] = array[start : start + BLOCK].T
        return result

    def inverse(self) -> "Transpose":
        return self

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]


@dataclasses.dataclass(frozen=True)
class Reshape(OneToOne):
    """The same numbers in the same order, from the shape `before` to the shape `after`."""

    before: Shape
    after: Shape

    def __post_init__(self) -> None:
        if math.prod(self.before) != math.prod(self.after):
            raise ValueError(f"{self} changes the number of elements")

    def apply(self, array: np.ndarray) -> np.ndarray:
        self.shape(array.shape)
        return contiguous(array).reshape(self.after)

    def inverse(self) -> "Reshape":
        return Reshape(self.after, self.before)

    def shape(self, shape: Shape) -> Shape:
        if shape != self.before:
            raise InputError(f"{list(shape)} must be {list(self.before)} for {self}")
        return self.after


@dataclasses.dataclass(frozen=True)
class SplitHeads(OneToOne):
    """`[..., N * H, ...]` as `[..., N, H, ...]`."""

    heads: int
    axis: int = 0

    def apply(self, array: np.ndarray) -> np.ndarray:
        return contiguous(array).reshape(self.shape(array.shape))

    def inverse(self) -> "MergeHeads":
        return MergeHeads(self.heads, self.axis)

    def shape(self, shape: Shape) -> Shape:
        size = size_of_axis(shape, self.axis, self)
        if size % self.heads:
            raise InputError(f"axis {self.axis} of {list(shape)} is not {self.heads} equal heads")
        return replaced(shape, self.axis, self.heads, size // self.heads)


@dataclasses.dataclass(frozen=True)
class MergeHeads(OneToOne):
    """`[..., N, H, ...]` as `[..., N * H, ...]`."""

    heads: int
    axis: int = 0

    def apply(self, array: np.ndarray) -> np.ndarray:
        return contiguous(array).reshape(self.shape(array.shape))

    def inverse(self) -> SplitHeads:
        return SplitHeads(self.heads, self.axis)

    def shape(self, shape: Shape) -> Shape:
        heads, width = (size_of_axis(shape, axis, self) for axis in (self.axis, self.axis + 1))
        if heads != self.heads:
            raise InputError(f"axis {self.axis} of {list(shape)} is not {self.heads} heads")
        return (*shape[: self.axis], heads * width, *shape[self.axis + 2 :])


@dataclasses.dataclass(frozen=True)
class RopePairing(OneToOne):
    """The rows of a query or key projection in the order of the other pairing of rotary positions.

    Within each head, rows `0, 1, ..., R-1` turn in the pairs `(i, i + R/2)` ("half", the
    `transformers` package and GPT-NeoX) or `(2i, 2i + 1)` ("adjacent", the paper, Meta's Llama and
    GPT-J). Rows from R on do not turn and stay.

    Args:
        heads: N for queries, K for keys; the axis holds that many heads.
        to: the pairing of the result; what comes in has the other.
        rotated: R, even; by default the whole head.
        axis: 0 for weights `[out, in]` and for biases.
    """

    heads: int
    to: Literal["adjacent", "half"]
    rotated: int | None = None
    axis: int = 0

    def apply(self, array: np.ndarray) -> np.ndarray:
        return np.take(array, self.rows(array.shape), axis=self.axis)

    def rows(self, shape: Shape) -> np.ndarray:
        """Where each row of the result comes from."""
        self.shape(shape)
        size = shape[self.axis]
        rows = np.arange(size).reshape(self.heads, size // self.heads)
        turning = self.rotated_width(shape)
        pairs = (2, turning // 2) if self.to == "adjacent" else (turning // 2, 2)
        order = np.arange(turning).reshape(pairs).T.ravel()
        rows[:, :turning] = rows[:, order]
        return rows.ravel()

    def rotated_width(self, shape: Shape) -> int:
        """R."""
        return shape[self.axis] // self.heads if self.rotated is None else self.rotated

    def inverse(self) -> "RopePairing":
        other: Literal["adjacent", "half"] = "half" if self.to == "adjacent" else "adjacent"
        return dataclasses.replace(self, to=other)

    def shape(self, shape: Shape) -> Shape:
        size = size_of_axis(shape, self.axis, self)
        width, rest = divmod(size, self.heads)
        turning = self.rotated_width(shape)
        if rest or turning % 2 or not 0 <= turning <= width:
            raise InputError(
                f"axis {self.axis} of {list(shape)} is not {self.heads} heads, each with an even "
                f"rotated width of at most its own, for {self}"
            )
        return shape


@dataclasses.dataclass(frozen=True)
class AddConstant(OneToOne):
    """Every number plus `value`, for files that store a scale as 1 + w (Gemma in GGUF). In floating
    point the way back is exact only where the sum was: never fold anything in that the layout does
    not ask for."""

    value: float

    def apply(self, array: np.ndarray) -> np.ndarray:
        return array + np.asarray(self.value, array.dtype)

    def inverse(self) -> "AddConstant":
        return AddConstant(-self.value)

    def shape(self, shape: Shape) -> Shape:
        return shape


@dataclasses.dataclass(frozen=True)
class Pad(OneToOne):
    """Rows of `value` before and after (a vocabulary rounded up, say)."""

    before: int = 0
    after: int = 0
    axis: int = 0
    value: float = 0.0

    def apply(self, array: np.ndarray) -> np.ndarray:
        padded = np.full(self.shape(array.shape), self.value, array.dtype)
        padded[inner(self, padded.shape)] = array
        return padded

    def inverse(self) -> "Slice":
        return Slice(self.before, self.after, self.axis, self.value)

    def shape(self, shape: Shape) -> Shape:
        size = size_of_axis(shape, self.axis, self)
        return replaced(shape, self.axis, self.before + size + self.after)


@dataclasses.dataclass(frozen=True)
class Slice(OneToOne):
    """Without the first and last rows, all of which must be `value`: nothing else is dropped."""

    before: int = 0
    after: int = 0
    axis: int = 0
    value: float = 0.0

    def apply(self, array: np.ndarray) -> np.ndarray:
        self.shape(array.shape)
        moved = np.moveaxis(array, self.axis, 0)
        for rows in (moved[: self.before], moved[len(moved) - self.after :]):
            if contiguous(rows).tobytes() != np.full_like(rows, self.value, order="C").tobytes():
                raise InputError(
                    f"{self} would drop rows that are not all {self.value}: keep them, with a "
                    f"config of {array.shape[self.axis]} rows"
                )
        return contiguous(array[inner(self, array.shape)])

    def inverse(self) -> Pad:
        return Pad(self.before, self.after, self.axis, self.value)

    def shape(self, shape: Shape) -> Shape:
        size = size_of_axis(shape, self.axis, self) - self.before - self.after
        if size < 0:
            raise InputError(f"axis {self.axis} of {list(shape)} is too short for {self}")
        return replaced(shape, self.axis, size)


def inner(padding: Pad | Slice, padded: Shape) -> tuple[slice, ...]:
    """The part of the padded array that is not padding."""
    rows = slice(padding.before, padded[padding.axis] - padding.after)
    return (*(slice(None) for _ in range(padding.axis)), rows)


@dataclasses.dataclass(frozen=True)
class Split:
    """One tensor into several along an axis: fused `[q | k | v]`, gate and up.

    Args:
        sizes: of each part, within a group.
        axis: along which the parts lie.
        groups: how often the parts repeat. 1: one block each (GPT-2, MPT, Phi-3). The number of
            heads N with sizes `(H, H, H)`: `q, k, v` of each head (GPT-NeoX, BLOOM). The number of
            key-value heads K with sizes `(G * H, H, H)`: queries, key and value of each group.
    """

    sizes: tuple[int, ...]
    axis: int = 0
    groups: int = 1

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        (array,) = arrays
        results = self.shapes([array.shape])
        before, after = array.shape[: self.axis], array.shape[self.axis + 1 :]
        grouped = array.reshape(*before, self.groups, sum(self.sizes), *after)
        starts = np.cumsum((0, *self.sizes)).tolist()
        return tuple(
            contiguous(
                grouped[(*(slice(None) for _ in range(self.axis + 1)), slice(start, start + size))]
            ).reshape(shape)
            for start, size, shape in zip(starts, self.sizes, results, strict=False)
        )

    def inverse(self) -> "Concatenate":
        return Concatenate(self.sizes, self.axis, self.groups)

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        (shape,) = only(shapes, 1, self)
        if size_of_axis(shape, self.axis, self) != self.groups * sum(self.sizes):
            sizes = " + ".join(str(size) for size in self.sizes)
            raise InputError(f"axis {self.axis} of {list(shape)} is not {self.groups} x ({sizes})")
        return tuple(replaced(shape, self.axis, self.groups * size) for size in self.sizes)


@dataclasses.dataclass(frozen=True)
class Concatenate:
    """Several tensors into one along an axis; see `Split` for the arguments."""

    sizes: tuple[int, ...]
    axis: int = 0
    groups: int = 1

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        (shape,) = self.shapes([array.shape for array in arrays])
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        parts = [
            array.reshape(*before, self.groups, size, *after)
            for array, size in zip(arrays, self.sizes, strict=True)
        ]
        return (np.concatenate(parts, axis=self.axis + 1).reshape(shape),)

    def inverse(self) -> Split:
        return Split(self.sizes, self.axis, self.groups)

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        only(shapes, len(self.sizes), self)
        for shape, size in zip(shapes, self.sizes, strict=True):
            if size_of_axis(shape, self.axis, self) != self.groups * size:
                wanted = f"{self.groups} x {size}"
                raise InputError(f"axis {self.axis} of {list(shape)} is not {wanted}, for {self}")
        whole = {replaced(shape, self.axis, self.groups * sum(self.sizes)) for shape in shapes}
        if len(whole) > 1:
            raise InputError(f"{[list(shape) for shape in shapes]} do not fit beside each other")
        return tuple(whole)


@dataclasses.dataclass(frozen=True)
class Stack:
    """`count` tensors of one shape as one with a new axis."""

    count: int
    axis: int = 0

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        self.shapes([array.shape for array in arrays])
        return (np.stack(arrays, axis=self.axis),)

    def inverse(self) -> "Unstack":
        return Unstack(self.count, self.axis)

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        shape, *others = only(shapes, self.count, self)
        if any(other != shape for other in others) or self.axis > len(shape):
            raise InputError(f"{[list(shape) for shape in shapes]} cannot be stacked by {self}")
        return ((*shape[: self.axis], self.count, *shape[self.axis :]),)


@dataclasses.dataclass(frozen=True)
class Unstack:
    """One tensor as `count` ones without the axis."""

    count: int
    axis: int = 0

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        self.shapes([array.shape for array in arrays])
        (array,) = arrays
        return tuple(contiguous(part) for part in np.moveaxis(array, self.axis, 0))

    def inverse(self) -> Stack:
        return Stack(self.count, self.axis)

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        (shape,) = only(shapes, 1, self)
        if size_of_axis(shape, self.axis, self) != self.count:
            raise InputError(f"axis {self.axis} of {list(shape)} is not {self.count}, for {self}")
        return (replaced(shape, self.axis),) * self.count


@dataclasses.dataclass(frozen=True)
class Each:
    """The first chain for the first tensor, the second for the second, and so on: the parts of a
    fused tensor that go different ways. Each chain makes one tensor of one."""

    chains: tuple[tuple[Operation, ...], ...]

    def apply_all(self, arrays: Sequence[np.ndarray]) -> Arrays:
        only(arrays, len(self.chains), self)
        pairs = zip(self.chains, arrays, strict=True)
        return tuple(result for chain, array in pairs for result in apply_all(chain, (array,)))

    def inverse(self) -> "Each":
        return Each(tuple(invert(chain) for chain in self.chains))

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        only(shapes, len(self.chains), self)
        pairs = zip(self.chains, shapes, strict=True)
        return tuple(result for chain, shape in pairs for result in shapes_of(chain, (shape,)))


def only(values: Sequence, count: int, operation: object) -> Sequence:
    """`values`, which must be as many as the operation takes.

    Raises:
        InputError: more or fewer.
    """
    if len(values) != count:
        raise InputError(f"{operation} is for {count} tensors, not for {len(values)}")
    return values
