"""Where arrays live: batches split over all devices, parameters on each of them."""

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")

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


def shard_rows(mesh: Mesh, batch: Tree) -> Tree:
    """Put a batch on the mesh, its rows (a multiple of the devices) split over them."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA_AXIS)))
