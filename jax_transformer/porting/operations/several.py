"""Operations that join or divide tensors."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.operations.base import (
    Arrays,
    Operation,
    Shape,
    apply_all,
    contiguous,
    invert,
    only,
    replaced,
    shapes_of,
    size_of_axis,
)


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
