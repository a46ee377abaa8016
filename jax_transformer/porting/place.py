"""Runs a plan onto devices: each device is given its part of each tensor, one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.operations import Shape
from jax_transformer.porting.plan import Move, Plan, check_tied
from jax_transformer.porting.stream import apply, cast
from jax_transformer.training.mesh import make_mesh, parse_axes, parts_of, sharding_of

Shardings = Callable[[str], Sharding]
"""Where the tensor of that name goes."""


def shardings_of(sharding: Mesh | str | Shardings, shapes: Mapping[str, Shape]) -> Shardings:
    """Where tensors go.

    Args:
        sharding: the sizes of a mesh (`data=1,model=8`), a mesh with such axes, on which parameters
            are split by `training.mesh.SPLIT`; or what gives the sharding of each name.
        shapes: of the tensors.

    Raises:
        InputError: too few devices, or a mesh that cannot split a tensor equally.
    """
    if isinstance(sharding, str):
        sizes = parse_axes(sharding)
        parts_of(shapes, sizes)
        sharding = make_mesh(sizes)
    if isinstance(sharding, Mesh):
        mesh = sharding
        parts_of(shapes, mesh.shape)
        return lambda name: sharding_of(mesh, name)
    return sharding


def place(
    plan: Plan, tensors: Mapping[str, LazyTensor], dtype: np.dtype | None, shardings: Shardings
) -> Iterator[tuple[str, jax.Array]]:
    """As `stream.stream`, of arrays on devices. Of a tensor that stays as it is a host reads no
    more than the parts of its own devices; of others the whole, one at a time.

    Raises:
        InputError: as `stream.stream`.
    """
    for name, of in plan.tied.items():
        check_tied(name, tensors[name].read(), of, tensors[of].read())
    for move in plan.moves:
        if not move.operations:
            yield from unchanged(move, tensors, dtype, shardings)
            continue
        results = apply(move, tensors, dtype)
        for target in move.targets:
            # Nothing here may hold on to an array: it would be there beside the next.
            array = results.pop(target)
            yield target, on_devices(array.shape, shardings(target), lambda i, a=array: a[i])
            del array


def unchanged(
    move: Move, tensors: Mapping[str, LazyTensor], dtype: np.dtype | None, shardings: Shardings
) -> Iterator[tuple[str, jax.Array]]:
    """The tensors of a move that does nothing to them."""
    for source, target in zip(move.sources, move.targets, strict=True):
        tensor = tensors[source]

        def part(index: tuple[slice, ...], name: str = target, of: LazyTensor = tensor):
            return cast(name, of.read_part(index), dtype)

        yield target, on_devices(tensor.shape, shardings(target), part)


def on_devices(
    shape: Shape, sharding: Sharding, part: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """An array of what `part` gives for the place of each device."""
    # Copied: JAX may keep the memory of what it is given, which may be the file.
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.array(part(index or ()), order="C")
    )
