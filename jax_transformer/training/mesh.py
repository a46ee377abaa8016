"""Where arrays live: batches split over all devices, parameters on each of them or split, too."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_transformer.errors import InputError

DATA_AXIS = "data"
MODEL_AXIS = "model"

COLUMNS, ROWS = PartitionSpec(None, MODEL_AXIS), PartitionSpec(MODEL_AXIS)

FIRST = ("q_proj", "k_proj", "v_proj", "linear1", "gate_proj", "up_proj")

SPLIT: Mapping[str, PartitionSpec] = {
    **{f"{name}.kernel": COLUMNS for name in FIRST},
    **{f"{name}.bias": ROWS for name in FIRST},
    **{f"{name}.kernel": ROWS for name in ("out_proj", "linear2", "down_proj")},
    # Over D, not over V: vocabularies are divisible by little.
    "embedding.embedding": COLUMNS,
    "output_proj.kernel": ROWS,
}
"""How parameters are split over the model axis, by the last two parts of their names; the others
are on every device. The first matrix of a sublayer is split by columns and the second by rows, so
that nothing between them is exchanged. Source: Shoeybi et al. 2019 (Megatron-LM), section 3."""


def data_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """One axis over `devices` (default: all that JAX finds), for data parallelism.

    Under jit every mean over a batch is over the whole batch, so the loss and the gradients of
    n devices are those of one, however many tokens each happens to hold.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh(
        (len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shard_rows(mesh: Mesh, batch: Any) -> Any:
    """Put a batch (`data.batches.Batch`, `data.packing.PackedBatch`) on the mesh, its rows split
    over the devices.

    Empty rows fill it up to a multiple of the devices. They come last and carry no loss, and
    dropout masks do not depend on them: the batch means the same on any number of devices.
    """
    empty = batch.empty_row()
    missing = -len(batch[0]) % mesh.devices.size
    filled = {
        name: np.pad(
            field,
            [(0, missing)] + [(0, 0)] * (np.ndim(field) - 1),
            constant_values=empty[name],
        )
        for name, field in batch._asdict().items()
    }
    return jax.device_put(type(batch)(**filled), NamedSharding(mesh, PartitionSpec(DATA_AXIS)))


def parse_axes(text: str) -> dict[str, int]:
    """`data=1,model=8` as sizes by axis; an axis that is left out has size 1.

    Raises:
        InputError: anything else.
    """
    sizes = {DATA_AXIS: 1, MODEL_AXIS: 1}
    parts = [part.partition("=") for part in text.split(",")]
    for name, _, size in parts:
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise InputError(
                f"sharding={text!r}: must name sizes of the axes {DATA_AXIS} and {MODEL_AXIS}, as "
                f"{DATA_AXIS}=1,{MODEL_AXIS}=8"
            )
        sizes[name] = int(size)
    if len({name for name, _, _ in parts}) < len(parts):
        raise InputError(f"sharding={text!r} names an axis twice")
    return sizes


def make_mesh(sizes: Mapping[str, int], devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `parse_axes`, over the first of `devices` (default: all that JAX finds).

    Raises:
        InputError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    needed = math.prod(sizes.values())
    if needed > len(devices):
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(
            f"sharding={axes} needs {needed} devices, JAX finds {len(devices)}: choose smaller "
            f"sizes"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:needed],
    )


def spec_of(name: str) -> PartitionSpec:
    """How the parameter (or the moment of one) of a dotted name is split."""
    return SPLIT.get(".".join(name.split(".")[-2:]), PartitionSpec())


def sharding_of(mesh: Mesh, name: str) -> NamedSharding:
    """Where the parameter of a dotted name lives on a mesh, which may lack an axis."""
    axes = (axis if axis in mesh.axis_names else None for axis in spec_of(name))
    return NamedSharding(mesh, PartitionSpec(*axes))


def parts_of(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """In how many parts each axis of each tensor is split.

    Args:
        shapes: by dotted name.
        sizes: of the axes of the mesh.

    Raises:
        InputError: an axis cannot be split so, all such in one line.
    """
    parts, problems = {}, []
    for name, shape in shapes.items():
        axes = (*spec_of(name), *[None] * len(shape))[: len(shape)]
        parts[name] = tuple(1 if axis is None else sizes.get(axis, 1) for axis in axes)
        problems += [
            f"axis {i} of {name} {list(shape)} is not divisible by {axes[i]}={part}"
            for i, part in enumerate(parts[name])
            if shape[i] % part
        ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise InputError(f"{'; '.join(problems[:3])}{more}: choose a divisor of all")
    return parts
