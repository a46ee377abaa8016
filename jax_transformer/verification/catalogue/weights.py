"""Weights in another order, from elsewhere, or rounded."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_transformer.layers.linear import Embedding, Linear, OutputProjection
from jax_transformer.layers.normalization import LayerNorm, RMSNorm
from jax_transformer.layers.rotary import adjacent_from_half, half_from_adjacent
from jax_transformer.verification.diagnose import Evidence, Remedy, Trial
from jax_transformer.verification.localize import FedCall

LEAVES = ("kernel", "embedding", "scale", "bias")


def leaf_of(module: Any) -> str | None:
    """The name of the module's main parameter."""
    if not isinstance(module, Linear | Embedding | OutputProjection | LayerNorm | RMSNorm):
        return None
    return next((name for name in LEAVES if getattr(module, name, None) is not None), None)


def replaced(**values: Any) -> Callable[[Trial], None]:
    """The change that gives the module other parameters."""

    def change(trial: Trial) -> None:
        for name, value in values.items():
            parameter = getattr(trial.module, name)
            parameter[...] = jnp.asarray(value, parameter.dtype)

    return change


def value_of(module: Any, leaf: str) -> np.ndarray | None:
    """A parameter as it is."""
    parameter = getattr(module, leaf, None)
    return None if parameter is None else np.asarray(parameter[...])


def transposed(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """A square matrix the wrong way round."""
    if isinstance(module, Linear):
        kernel = np.asarray(module.kernel[...])
        if kernel.shape[0] == kernel.shape[1]:
            yield Remedy(
                "transposed kernel",
                "its kernel is transposed: PyTorch keeps [out, in], JAX [in, out], except for "
                "GPT-2's Conv1D",
                replaced(kernel=kernel.T),
            )


def head_order(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """Features of heads in another order: interleaved heads, or the other rotary pairing."""
    name = evidence.module.rpartition(".")[2]
    if not isinstance(module, Linear) or name not in ("q_proj", "k_proj", "v_proj", "out_proj"):
        return
    kernel, bias = np.asarray(module.kernel[...]), value_of(module, "bias")
    axis = 0 if name == "out_proj" else 1
    size = kernel.shape[axis]

    def permuted(order: np.ndarray) -> Callable[[Trial], None]:
        values = {"kernel": np.take(kernel, order, axis)}
        if bias is not None and axis == 1:
            values["bias"] = bias[order]
        return replaced(**values)

    for heads in [h for h in range(1, size + 1) if size % h == 0]:
        width = size // heads
        if 1 < heads < size:
            yield Remedy(
                "head order",
                f"its {size} features are {width} x {heads}, not {heads} x {width}: the heads are "
                f"the inner axis in the checkpoint",
                permuted(np.arange(size).reshape(heads, width).T.ravel()),
            )
        if width % 2 == 0 and name in ("q_proj", "k_proj") and width > 2:
            for text, make in (
                ("adjacent", adjacent_from_half),
                ("half-split", half_from_adjacent),
            ):
                inner = make(width)
                order = (np.arange(heads)[:, None] * width + inner).ravel()
                yield Remedy(
                    "rotary row order",
                    f"its rows are in the order of {text} pairs, heads of {width}: the checkpoint "
                    f"was permuted for the other rotary pairing, or once too often",
                    permuted(order),
                )


def fused_layout(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """A fused projection that was cut in thirds where it is interleaved head by head, or the
    reverse."""
    name = evidence.module.rpartition(".")[2]
    names = ("q_proj", "k_proj", "v_proj")
    if not isinstance(module, Linear) or name not in names:
        return
    found = [evidence.sibling(f"{each}.kernel") for each in names]
    parts = [part for part in found if part is not None and part.shape == module.kernel.shape]
    if len(parts) < len(names):
        return
    sides = [evidence.sibling(f"{each}.bias") for each in names]
    biases = [bias for bias in sides if bias is not None]
    size, index = parts[0].shape[1], names.index(name)
    fused = np.concatenate(parts, axis=1)
    for heads in [h for h in range(2, size + 1) if size % h == 0]:
        width = size // heads
        columns = np.arange(3 * size)
        for text, order in (
            ("per head", columns.reshape(heads, 3, width).swapaxes(0, 1).reshape(3, size)),
            ("in thirds", columns.reshape(3, heads, width).swapaxes(0, 1).reshape(3, size)),
        ):
            values = {"kernel": fused[:, order[index]]}
            if len(biases) == len(names):
                values["bias"] = np.concatenate(biases)[order[index]]
            yield Remedy(
                "fused layout",
                f"the fused query-key-value projection is read {text}, {heads} heads of {width}: "
                f"the checkpoint has it in the other layout",
                replaced(**values),
            )


def swapped(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The parameters of another module of the same shapes."""
    leaf = leaf_of(module)
    if leaf is None:
        return
    shape = np.shape(getattr(module, leaf)[...])
    for name, value in evidence.ours.items():
        other, _, other_leaf = name.rpartition(".")
        if other_leaf != leaf or value.shape != shape or other == evidence.module:
            continue
        values = {leaf: value}
        if leaf != "bias" and value_of(module, "bias") is not None:
            bias = evidence.ours.get(f"{other}.bias")
            if bias is None or bias.shape != np.shape(module.bias[...]):
                continue
            values["bias"] = bias
        yield Remedy(
            "swapped tensors",
            f"it has the weights of {other}: two tensors are exchanged, or one was loaded twice",
            replaced(**values),
        )


def tied_head(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The head is the embedding table, or is not."""
    if not isinstance(module, OutputProjection) or module.kernel is None:
        return
    for name, table in evidence.ours.items():
        if name.endswith("embedding.embedding") and table.T.shape == module.kernel.shape:
            yield Remedy(
                "tied head",
                f"the output projection is the transpose of {name}: the reference ties them, set "
                f"tied=True",
                replaced(kernel=table.T),
            )


def from_reference(module: Any, call: FedCall, evidence: Evidence) -> Iterator[Remedy]:
    """The weights differ as such: rounded to a narrow dtype, of the other sign, or otherwise."""
    leaf = leaf_of(module)
    if leaf is None:
        return
    theirs = {
        name: np.asarray(evidence.theirs[f"{evidence.module}.{name}"], np.float64)
        for name in LEAVES
        if f"{evidence.module}.{name}" in evidence.theirs
        and getattr(module, name, None) is not None
    }
    ours = {name: np.asarray(getattr(module, name)[...]) for name in theirs}
    unequal = [n for n in theirs if not np.array_equal(ours[n].astype(np.float64), theirs[n])]
    if not unequal:
        return
    kind, sentence = (
        "other weights",
        f"it has the reference's {' and '.join(unequal)}: the port changed the numbers",
    )
    for dtype in (ml_dtypes.bfloat16, np.float16):
        if all(is_rounded(ours[n], theirs[n], dtype) for n in unequal):
            narrow = np.dtype(dtype).name
            kind = "rounded weights"
            sentence = f"it has the reference's weights: one side was stored in {narrow}"
            break
    yield Remedy(kind, sentence, replaced(**{name: theirs[name] for name in unequal}))


def is_rounded(one: np.ndarray, two: np.ndarray, dtype: Any) -> bool:
    """Whether one of two arrays is the other, rounded to `dtype`."""
    return any(
        np.array_equal(a.astype(dtype).astype(b.dtype), b) for a, b in ((one, two), (two, one))
    )


ENTRIES = (transposed, head_order, fused_layout, swapped, tied_head, from_reference)
