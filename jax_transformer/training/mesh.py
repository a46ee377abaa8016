"""Where arrays live: batches split over all devices, parameters on each of them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_transformer.config import IGNORED_LABEL, PAD_ID
from jax_transformer.data.batches import Batch

DATA_AXIS = "data"

# What an empty row holds, field by field.
EMPTY_ROW = {
    "source": PAD_ID,
    "source_lengths": 0,
    "decoder_input": PAD_ID,
    "labels": IGNORED_LABEL,
    "target_lengths": 0,
}


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


def shard_rows(mesh: Mesh, batch: Batch) -> Batch:
    """Put a batch on the mesh, its rows split over the devices.

    Empty rows fill it up to a multiple of the devices. They come last and carry no loss, and
    dropout masks do not depend on them: the batch means the same on any number of devices.
    """
    missing = -len(batch.source) % mesh.devices.size
    filled = {
        name: np.pad(
            field,
            [(0, missing)] + [(0, 0)] * (np.ndim(field) - 1),
            constant_values=EMPTY_ROW[name],
        )
        for name, field in batch._asdict().items()
    }
    return jax.device_put(Batch(**filled), NamedSharding(mesh, PartitionSpec(DATA_AXIS)))
