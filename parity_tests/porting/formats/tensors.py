"""Tensors whose bits arithmetic would lose, and how tests compare and write them."""

import ml_dtypes
import numpy as np
import torch

from jax_transformer.porting.formats.base import header_of

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
OTHERS = [np.int64, np.int32, np.uint8, np.int8, np.bool_, ml_dtypes.float8_e4m3fn]
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4), (0,), (3, 0)]


def random_bits(shape, dtype, seed=0):
    """Any bits: NaNs with payloads, negative zeros, subnormals."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if dtype == np.bool_:
        data &= 1
    return data.view(dtype).reshape(shape)


def assortment(dtypes=(*FLOATS, *OTHERS)):
    """A tensor of every shape in every dtype."""
    return {
        f"{np.dtype(dtype).name}.{number}": random_bits(shape, dtype, number)
        for dtype in dtypes
        for number, shape in enumerate(SHAPES)
    }


def write(writer_class, path, tensors, **options):
    headers = {name: header_of(array) for name, array in tensors.items()}
    with writer_class(path, headers, **options) as writer:
        for name, array in tensors.items():
            writer.add(name, array)
    return path


def assert_same(found, expected):
    """Names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert_same_bits(found[name], array, name)


def assert_same_bits(first, second, name=""):
    assert first.dtype == second.dtype, name
    assert first.shape == second.shape, name
    assert first.tobytes() == second.tobytes(), name


def read_all(checkpoint):
    arrays = {}
    for name, tensor in checkpoint.tensors.items():
        arrays[name] = tensor.read()
        assert header_of(arrays[name]) == header_of(tensor), name
    return arrays


def to_torch(array):
    """The same bits as a tensor of PyTorch, which takes no bfloat16 from NumPy."""
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        if array.size == 0:
            return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)
    return torch.from_numpy(array.copy())


def from_torch(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), np.dtype(name))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype(name)).reshape(tuple(tensor.shape))


def leftovers(folder):
    """What a failed port has left."""
    return sorted(path.name for path in folder.rglob("*partial*"))
