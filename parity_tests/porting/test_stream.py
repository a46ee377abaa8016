"""Porting tensor by tensor: every bit, a manifest, little memory, and all or nothing."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import (
    huggingface,
    meta,
    orbax_run,
    safetensors_file,
    torch_file,
)
from jax_transformer.porting.formats.base import LazyTensor, header_of
from jax_transformer.porting.operations import Split, Transpose
from jax_transformer.porting.plan import make_plan, make_plan_back
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.rules import Alias, Rule
from jax_transformer.porting.stream import copy_plan, headers, port, stream
from parity_tests.porting.formats.tensors import (
    assert_same,
    leftovers,
    random_bits,
    read_all,
    write,
)

TENSORS = {
    "tok_embeddings.weight": random_bits((8, 4), ml_dtypes.bfloat16, 1),
    "layers.0.attention.wq.weight": random_bits((4, 4), np.float16, 2),
    "layers.0.attention.wo.weight": random_bits((4, 4), np.float32, 3),
    "norm.weight": random_bits((4,), np.float32, 4),
}
WRITERS: dict[str, Any] = {
    "safetensors": (safetensors_file.FileWriter, {}),
    "pt": (torch_file.FileWriter, {}),
    "huggingface": (huggingface.FolderWriter, {"config": {"a": 1}, "shard_bytes": 100}),
    "meta": (meta.FolderWriter, {"config": {"dim": 4}, "shards": 2}),
    "orbax": (orbax_run.FolderWriter, {"config": {"model": {}}, "buffers": ["norm.weight"]}),
}


def lazy(array):
    return LazyTensor(array.shape, array.dtype, lambda: array)


@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize("target", WRITERS)
def test_every_format_becomes_every_other_bit_for_bit(tmp_path, source, target):
    writer, options = WRITERS[source]
    checkpoint = open_checkpoint(write(writer, tmp_path / "a", TENSORS, **options))
    assert checkpoint.format == source
    writer, options = WRITERS[target]
    plan = copy_plan(checkpoint.tensors)
    port(plan, checkpoint.tensors, lambda h: writer(tmp_path / "b", h, **options))
    ported = open_checkpoint(tmp_path / "b")
    assert ported.format == target
    assert_same(read_all(ported), TENSORS)
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("target", WRITERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_arrays_of_jax_come_back_in_their_dtype_with_their_bits(tmp_path, target, dtype):
    array = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), dtype)
    tensors = {"layers.0.attention.wo.weight": lazy(np.asarray(array))}
    writer, options = WRITERS[target]
    options = {name: value for name, value in options.items() if name != "buffers"}
    port(copy_plan(tensors), tensors, lambda h: writer(tmp_path / "a", h, **options))
    (back,) = read_all(open_checkpoint(tmp_path / "a")).values()
    back = jnp.asarray(back)
    assert back.dtype == array.dtype
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


RULES = (
    Alias("head", "table"),
    Rule("table", "embedding"),
    Rule("qkv", ("q", "k", "v"), (Split((4, 2, 2)), Transpose())),
)


def model():
    arrays = {"table": random_bits((5, 4), np.float32), "qkv": random_bits((8, 3), np.float16)}
    return arrays | {"head": arrays["table"].copy()}


def test_the_manifest_says_what_became_of_what(tmp_path):
    arrays = model()
    tensors = {name: lazy(array) for name, array in arrays.items()}
    plan = make_plan(RULES, tensors, None)
    path = tmp_path / "a.safetensors"
    manifest = port(
        plan, tensors, lambda h: safetensors_file.FileWriter(path, h), about={"family": "test"}
    )
    assert manifest == json.loads((tmp_path / "a.safetensors.manifest.json").read_text())
    assert manifest["family"] == "test"
    assert manifest["tied"] == {"head": "table"}
    assert [entry["name"] for entry in manifest["tensors"]] == ["embedding", "q", "k", "v"]
    assert manifest["tensors"][2] == {
        "name": "k",
        "sources": ["qkv"],
        "operations": ["Split(sizes=(4, 2, 2), axis=0, groups=1)", "Transpose()"],
        "dtype": "float16",
        "shape": [3, 2],
        "sha256": hashlib.sha256(arrays["qkv"][4:6].T.tobytes()).hexdigest(),
    }


def test_the_manifest_of_a_folder_is_in_it(tmp_path):
    tensors = {"a": lazy(np.ones(3))}
    manifest = port(
        copy_plan(tensors),
        tensors,
        lambda h: huggingface.FolderWriter(tmp_path / "m", h, config={}),
    )
    assert manifest == json.loads((tmp_path / "m" / "manifest.json").read_text())


@pytest.mark.parametrize("aliases", [False, True])
def test_the_way_back_gives_the_source_with_its_second_names_if_asked_for(tmp_path, aliases):
    arrays = model()
    there = dict(
        stream(make_plan(RULES, arrays_as_tensors(arrays), None), arrays_as_tensors(arrays))
    )
    plan = make_plan_back(RULES, there, aliases=aliases)
    back = dict(stream(plan, arrays_as_tensors(there)))
    assert {name: header_of(array) for name, array in back.items()} == headers(plan)
    assert list(back) == list(headers(plan))
    assert_same(back, arrays if aliases else {name: arrays[name] for name in ("table", "qkv")})


def arrays_as_tensors(arrays):
    return {name: lazy(array) for name, array in arrays.items()}


def test_tied_names_with_different_numbers_leave_nothing(tmp_path):
    arrays = model()
    arrays["head"].view(np.uint32)[0, 0] ^= 1
    tensors = arrays_as_tensors(arrays)
    plan = make_plan(RULES, tensors, None)
    with pytest.raises(InputError, match="head and table are one table"):
        port(plan, tensors, lambda h: safetensors_file.FileWriter(tmp_path / "a", h))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", WRITERS)
def test_a_tensor_that_cannot_be_read_leaves_nothing(tmp_path, target):
    def fail():
        raise InputError("the file is gone")

    tensors = arrays_as_tensors(TENSORS)
    tensors["norm.weight"] = LazyTensor((4,), np.dtype(np.float32), fail)
    writer, options = WRITERS[target]
    with pytest.raises(InputError, match=r"norm\.weight: the file is gone"):
        port(copy_plan(tensors), tensors, lambda h: writer(tmp_path / "b", h, **options))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_files():
    """No file may grow beyond so many bytes, as if the disk were full then."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("target", WRITERS)
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path, target, small_files):
    tensors = arrays_as_tensors(
        {f"layers.{i}.attention.wo.weight": random_bits((4, 90_000), np.float32) for i in range(3)}
    )
    writer, options = WRITERS[target]
    options = options | ({"buffers": []} if target == "orbax" else {})
    small_files(1_000_000)  # Room for all but the tensors.
    with pytest.raises(InputError, match="File too large") as refusal:
        port(copy_plan(tensors), tensors, lambda h: writer(tmp_path / "b", h, **options))
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_dtypes_change_only_if_asked_for():
    values = {"w": np.array([1.0, -0.0, np.inf, 3e-5]), "n": np.arange(3)}
    tensors = arrays_as_tensors(values)
    plan = copy_plan(tensors)
    assert_same(dict(stream(plan, tensors)), values)
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        cast = dict(stream(plan, tensors, dtype))
        assert_same(cast, values | {"w": values["w"].astype(dtype)})
        assert {name: header_of(array) for name, array in cast.items()} == headers(plan, dtype)


def test_narrow_floats_are_cast_too():
    tensors = {"w": lazy(np.ones(3, ml_dtypes.bfloat16))}
    (result,) = dict(stream(copy_plan(tensors), tensors, np.dtype(np.float32))).values()
    assert result.dtype == np.float32


def test_numbers_too_large_for_a_dtype_are_refused():
    tensors = {"w": lazy(np.array([1e6], np.float32))}
    with pytest.raises(InputError, match="w has numbers too large for float16"):
        dict(stream(copy_plan(tensors), tensors, np.dtype(np.float16)))


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jax_transformer.porting.formats import huggingface, safetensors_file, torch_file
from jax_transformer.porting.operations import Transpose
from jax_transformer.porting.plan import make_plan
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.rules import Rule
from jax_transformer.porting.stream import port

folder, kill = Path(sys.argv[1]), int(sys.argv[2])
writers = {
    "a.safetensors": safetensors_file.FileWriter,
    "b.pt": torch_file.FileWriter,
    "c": lambda path, headers: huggingface.FolderWriter(path, headers, config={}),
}
tensors = open_checkpoint(folder / "source").tensors
rules = (Rule("{name}.w", "{name}.kernel", (Transpose(),)), Rule("{name}.b", "{name}.b"))
plan = make_plan(rules, tensors, None)

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

class Killing(dict):
    def __getitem__(self, name):
        if kill and name == "9.w":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)

for name in [sys.argv[3]] if kill else writers:
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    port(plan, Killing(tensors), lambda headers: writers[name](folder / name, headers))
    print(peak() - before)
"""


def child(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), *arguments], capture_output=True, text=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_that_of_two_tensors_however_large_the_checkpoint(tmp_path):
    size = 8  # MB
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(12):
        tensors[f"{layer}.w"] = rng.integers(0, 255, (2048, size * 256), np.uint16)
        tensors[f"{layer}.b"] = rng.integers(0, 255, size << 20, np.uint8)
    write(safetensors_file.FileWriter, tmp_path / "source", tensors)
    result = child(tmp_path, "0")
    peaks = [int(line) for line in result.stdout.split()]
    assert len(peaks) == 3, result.stderr
    # 192 MB in tensors of 8 MB: what is read, what is made of it, and 16 MB for the rest.
    assert max(peaks) <= 2 * size + 16
    ported = read_all(open_checkpoint(tmp_path / "b.pt"))
    np.testing.assert_array_equal(ported["3.kernel"], tensors["3.w"].T)


@pytest.mark.parametrize("target", ["a.safetensors", "b.pt", "c"])
def test_a_killed_port_leaves_nothing_that_looks_finished(tmp_path, target):
    tensors = {f"{layer}.w": random_bits((20, 30), np.float32, layer) for layer in range(12)}
    write(safetensors_file.FileWriter, tmp_path / "source", tensors)
    assert child(tmp_path, "1", target).returncode == -9
    assert not (tmp_path / target).exists()
    (left,) = leftovers(tmp_path)[:1]
    assert left.startswith(".")
    with pytest.raises(InputError):
        open_checkpoint(tmp_path / left)
    # And the port can be run again.
    assert child(tmp_path, "0").returncode == 0
