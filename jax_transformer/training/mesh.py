"""Where arrays live: batches split over all devices, parameters on each of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"


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
