"""What a rule does to tensors: a change of layout, with its inverse and its shape rule.

Axes are counted in the array as it comes in. Every result is contiguous: some writers store the raw
memory of a strided view. No operation touches a number but `AddConstant`, and none a dtype.
"""

from jax_transformer.porting.operations.base import (
    Arrays,
    Operation,
    Shape,
    apply_all,
    contiguous,
    invert,
    shapes_of,
)
from jax_transformer.porting.operations.one import (
    AddConstant,
    MergeHeads,
    Pad,
    Reshape,
    RopePairing,
    Slice,
    SplitHeads,
    Transpose,
)
from jax_transformer.porting.operations.several import (
    Concatenate,
    Each,
    Split,
    Stack,
    Unstack,
)

__all__ = [
    "AddConstant",
    "Arrays",
    "Concatenate",
    "Each",
    "MergeHeads",
    "Operation",
    "Pad",
    "Reshape",
    "RopePairing",
    "Shape",
    "Slice",
    "Split",
    "SplitHeads",
    "Stack",
    "Transpose",
    "Unstack",
    "apply_all",
    "contiguous",
    "invert",
    "shapes_of",
]
