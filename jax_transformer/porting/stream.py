"""Runs a plan tensor by tensor: in memory is what one move reads and what it makes."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import LazyTensor, Writer, flat_bytes, header_of
from jax_transformer.porting.operations import contiguous
from jax_transformer.porting.plan import Header, Move, Plan, check_tied

Headers = Mapping[str, Header]

AHEAD = 100 * 10**6
"""Bytes up to which a move is made while the one before is being written."""


def headers(plan: Plan, dtype: np.dtype | None = None) -> dict[str, Header]:
    """Every tensor that `stream` gives, in order.

    Args:
        plan: what goes where.
        dtype: of the floating-point tensors; by default each keeps its own, bit for bit.
    """
    return {
        name: Header(header.shape, cast_dtype(header.dtype, dtype))
        for name, header in plan.headers().items()
    }


def stream(
    plan: Plan, tensors: Mapping[str, LazyTensor], dtype: np.dtype | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Each target with its name. Drop an array before the next is asked for.

    Raises:
        InputError: a tensor cannot be read, tied names hold different tensors, rows would be
            dropped that are not padding, a number that `dtype` cannot hold.
    """
    for name, of in plan.tied.items():
        check_tied(name, tensors[name].read(), of, tensors[of].read())
    with ThreadPoolExecutor(1) as pool:
        ahead: Future[dict[str, np.ndarray]] | None = None
        for move, following in itertools.pairwise((*plan.moves, None)):
            assert move is not None
            # Nothing here may hold on to an array: it would be there beside the next.
            results = apply(move, tensors, dtype) if ahead is None else ahead.result()
            small = following is not None and size_of(following, tensors) <= AHEAD
            ahead = pool.submit(apply, following, tensors, dtype) if small else None
            for target in move.targets:
                for name in plan.names(target)[:-1]:
                    yield name, results[target]
                yield target, results.pop(target)


def size_of(move: Move, tensors: Mapping[str, LazyTensor]) -> int:
    """Bytes of what a move reads and of what it makes."""
    read = sum(tensors[name].nbytes for name in move.sources)
    return read + sum(Header(shape, move.dtype).nbytes for shape in move.shapes)


def apply(
    move: Move, tensors: Mapping[str, LazyTensor], dtype: np.dtype | None
) -> dict[str, np.ndarray]:
    """The targets of a move.

    Raises:
        InputError: what its operations raise, with the name; a number that `dtype` cannot hold.
    """
    try:
        results = move.apply(tensors[name].read() for name in move.sources)
    except InputError as error:
        raise InputError(f"{' + '.join(move.sources)}: {error}") from None
    for name in results:
        results[name] = cast(name, results[name], dtype)
    return results


def cast_dtype(dtype: np.dtype, wanted: np.dtype | None) -> np.dtype:
    """The dtype of a tensor after `cast`."""
    floating = np.issubdtype(dtype, np.floating) or dtype.kind == "V"
    return dtype if wanted is None or not floating else wanted


def cast(name: str, array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """A floating-point tensor in another dtype.

    Raises:
        InputError: a number too large for it.
    """
    wanted = cast_dtype(array.dtype, dtype)
    if wanted == array.dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(wanted)
    if not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise InputError(f"{name} has numbers too large for {wanted}: choose a wider dtype")
    return result


def port(
    plan: Plan,
    tensors: Mapping[str, LazyTensor],
    make_writer: Callable[[Headers], Writer],
    *,
    dtype: np.dtype | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write all that the plan gives; the destination appears when it is complete.

    Args:
        plan: what goes where.
        tensors: of the source.
        make_writer: the writer of the destination for those headers.
        dtype: see `headers`.
        about: what else the manifest says (source, family).

    Returns:
        The manifest, which is written into or beside the destination: of each tensor its name, the
        names it is made of, operations, dtype, shape and the SHA-256 of its bytes.

    Raises:
        InputError: what `stream` and the writer raise; nothing is left then.
    """
    written = headers(plan, dtype)
    origins = {name: move for move in plan.moves for t in move.targets for name in plan.names(t)}
    entries: list[dict[str, Any]] = []
    with make_writer(written) as writer, ThreadPoolExecutor(1) as pool:
        for name, array in stream(plan, tensors, dtype):
            # Both let other threads run: hashing takes as long as writing.
            digest = pool.submit(sha256, array)
            writer.add(name, array)
            del array
            move, header = origins[name], written[name]
            operations = [repr(operation) for operation in move.operations]
            if header.dtype != move.dtype:
                operations.append(f"cast({header.dtype})")
            entries.append(
                {
                    "name": name,
                    "sources": list(move.sources),
                    "operations": operations,
                    "dtype": str(header.dtype),
                    "shape": list(header.shape),
                    "sha256": digest.result(),
                }
            )
        manifest = {
            **(about or {}),
            "ignored": dict(plan.ignored),
            "computed": dict(plan.computed),
            "tied": dict(plan.tied),
            "tensors": entries,
        }
        writer.manifest = manifest
    return manifest


def sha256(array: np.ndarray) -> str:
    """The hash of a tensor's bytes."""
    return hashlib.sha256(flat_bytes(contiguous(array))).hexdigest()


def copy_plan(tensors: Mapping[str, LazyTensor]) -> Plan:
    """Every tensor as it is, under its own name: from one format to another."""
    moves = tuple(
        Move((name,), (name,), (), (tensor.shape,), header_of(tensor).dtype)
        for name, tensor in tensors.items()
    )
    return Plan(moves=moves, tied={}, ignored={}, computed={})
