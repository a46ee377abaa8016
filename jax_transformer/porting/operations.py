"""What a rule does to a tensor: a change of layout, with its inverse and its shape rule."""

import dataclasses
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Operation(Protocol):
    """A change of layout."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Source to target."""
        ...

    def inverse(self) -> "Operation":
        """Target to source."""
        ...

    def shape(self, shape: Shape) -> Shape:
        """The shape that `apply` gives."""
        ...


@dataclasses.dataclass(frozen=True)
class Transpose:
    """A matrix `[out, in]` (PyTorch's `nn.Linear`) as a kernel `[in, out]`; its own inverse."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        # Contiguous: some writers store the raw memory of a strided view.
        return np.ascontiguousarray(array.T)

    def inverse(self) -> "Transpose":
        return self

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]
