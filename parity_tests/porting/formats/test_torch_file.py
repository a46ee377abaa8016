"""PyTorch's files: bit for bit what torch reads and writes; no file runs code."""

import argparse
import collections
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.base import LazyTensor
from jax_transformer.porting.formats.torch_file import FileWriter, load, read
from parity_tests.porting.formats.tensors import (
    assert_same,
    assert_same_bits,
    assortment,
    from_torch,
    random_bits,
    read_all,
    to_torch,
    write,
)


def saved(tmp_path, content, **options):
    path = tmp_path / "a.pt"
    torch.save(content, path, **options)
    return path


def tensors():
    return {"w": random_bits((2, 3), np.float32), "b": random_bits((3,), np.float16)}


def as_torch(arrays):
    return {name: to_torch(array) for name, array in arrays.items()}


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_every_dtype_and_shape_is_read_as_torch_wrote_it(tmp_path, new):
    arrays = assortment()
    path = saved(tmp_path, as_torch(arrays), _use_new_zipfile_serialization=new)
    assert_same(read_all(read(path)), arrays)


@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=str)
def test_every_dtype_and_shape_is_written_as_torch_reads_it(tmp_path, options):
    arrays = assortment()
    path = write(FileWriter, tmp_path / "x.pt", arrays)
    loaded = torch.load(path, weights_only=True, **options)
    assert type(loaded) is collections.OrderedDict
    assert_same({name: from_torch(tensor) for name, tensor in loaded.items()}, arrays)
    assert_same(read_all(read(path)), arrays)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_storages_are_aligned_like_those_of_torch(tmp_path):
    arrays = {name: random_bits((3,), np.uint8) for name in "abc"} | {"d": np.ones(2)}
    array = read(write(FileWriter, tmp_path / "x.pt", arrays)).tensors["d"].read()
    assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_views_of_one_storage_are_read_as_the_numbers_that_they_show(tmp_path, new):
    whole = torch.arange(24.0).reshape(4, 6)
    views = {
        "whole": whole,
        "transposed": whole.T,
        "part": whole[1:3, 2:5],
        "expanded": whole[:1, :1].expand(3, 2),
        "tied": whole,
        "empty": whole[:0],
        "last": whole[-1, -1],
    }
    found = read_all(read(saved(tmp_path, views, _use_new_zipfile_serialization=new)))
    assert_same(found, {name: view.numpy() for name, view in views.items()})
    assert all(array.flags.c_contiguous for array in found.values())


def test_parameters_and_the_state_dict_of_a_module_are_read(tmp_path):
    module = torch.nn.BatchNorm1d(3)
    state = module.state_dict()
    expected = {name: tensor.numpy() for name, tensor in state.items()}
    assert_same(read_all(read(saved(tmp_path, state))), expected)
    checkpoint = read(saved(tmp_path, dict(module.named_parameters())))
    assert checkpoint.tensors.keys() == {"weight", "bias"}


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "model_state_dict", "module"])
def test_a_state_dict_is_found_under_the_usual_names(tmp_path, wrapper):
    arrays = tensors()
    content = {wrapper: as_torch(arrays), "step": 3, "optimizer": {"state": {}}, "lr": 0.5}
    checkpoint = read(saved(tmp_path, content))
    assert_same(read_all(checkpoint), arrays)
    assert checkpoint.metadata == {"step": 3, "optimizer": {"state": {}}, "lr": 0.5}


@pytest.mark.parametrize(
    "content",
    [{}, [], 3, {"step": 3}, {"model": {}, "state_dict": {}}, {"w": 1}, torch.zeros(2)],
    ids=str,
)
def test_a_file_without_a_state_dict_is_refused(tmp_path, content):
    with pytest.raises(InputError, match="no state dict"):
        read(saved(tmp_path, content))


def test_what_a_training_run_saves_beside_its_model_is_read_with_the_same_safety(tmp_path):
    module = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    numpy_state: Any = np.random.RandomState(0).get_state()
    content: dict[str, Any] = {
        "optimizer": optimizer.state_dict(),
        "numpy": numpy_state,
        "python": random.Random(0).getstate(),
        "torch": torch.get_rng_state(),
        "scalar": np.float64(0.5),
        "size": torch.Size([2]),
        "big": 1 << 70,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    found = load(saved(tmp_path, content))
    moments = found["optimizer"]["state"][0]["exp_avg"].read()
    assert_same_bits(moments, optimizer.state_dict()["state"][0]["exp_avg"].numpy())
    assert found["optimizer"]["param_groups"] == content["optimizer"]["param_groups"]
    assert found["python"] == content["python"]
    np.testing.assert_array_equal(found["numpy"][1], numpy_state[1])
    assert (found["scalar"], found["size"], found["big"]) == (0.5, (2,), 1 << 70)


class TouchesAFile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_file_that_would_run_code_is_refused_with_what_it_would_call(tmp_path, new):
    marker = tmp_path / "marker"
    content = as_torch(tensors()) | {"x": TouchesAFile(marker)}
    path = saved(tmp_path, content, _use_new_zipfile_serialization=new)
    with pytest.raises(InputError, match=r"would call posix\.mkdir when it is loaded"):
        read(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        (argparse.Namespace(a=1), r"argparse\.Namespace"),
        (eval, r"__builtin__\.eval|builtins\.eval"),
    ],
)
def test_objects_are_refused_by_name(tmp_path, content, name):
    with pytest.raises(InputError, match=f"would call ({name}) .*save the state_dict"):
        read(saved(tmp_path, content))


def zip_with(tmp_path, data, entries=()):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", data)
        for name, content in entries:
            archive.writestr(name, content)
    return tmp_path / "a.pt"


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(X\x02\x00\x00\x00idtR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x8c\x0btorch._utils\x8c\x1d_rebuild_tensor_v2.__globals__\x93.",
        b"ctorch\n_utils._rebuild_tensor_v2.__globals__\n.",
        b"\x80\x02}q\x00.garbage"[:5],
        b"garbage",
        b"",
        pickle.dumps({"a": 1})[:-3],
        b"ctorch._utils\n_rebuild_tensor_v2\n(tR.",
    ],
)
def test_hand_made_pickles_are_refused(tmp_path, data):
    with pytest.raises(InputError) as refusal:
        read(zip_with(tmp_path, data))
    assert "\n" not in str(refusal.value)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.booleans())
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, data, new):
    buffer = io.BytesIO()
    torch.save(as_torch(tensors()), buffer, _use_new_zipfile_serialization=new)
    whole = buffer.getvalue()
    cut = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "cut.pt").write_bytes(whole[:cut])
    with pytest.raises(InputError):
        read(tmp_path / "cut.pt")


def rewritten(tmp_path, change):
    """A file of torch with other entries."""
    with zipfile.ZipFile(saved(tmp_path, as_torch(tensors()))) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    change(entries)
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return tmp_path / "b.pt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("a/data/0"), "lacks the storage 0"),
        (lambda e: e.update({"a/data/0": b"123"}), r"storage 0 has 3 bytes, must be 24"),
        (lambda e: e.update({"a/byteorder": b"big"}), "big-endian"),
        (lambda e: e.pop("a/data.pkl"), r"0 entries called data\.pkl"),
        (lambda e: e.update({"b/data.pkl": b"N."}), r"2 entries called data\.pkl"),
    ],
)
def test_an_archive_that_lacks_something_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read(rewritten(tmp_path, change))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"K\x02K\x03\x86", b"K\x02K\x04\x86"), (b"K\x03K\x01\x86", b"K\x09K\x01\x86")],
    ids=["shape", "strides"],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path, old, new):
    def change(entries):
        assert old in entries["a/data.pkl"]
        entries["a/data.pkl"] = entries["a/data.pkl"].replace(old, new)

    with pytest.raises(InputError, match="reaches beyond storage"):
        read(rewritten(tmp_path, change))


def test_a_storage_that_is_there_twice_is_refused(tmp_path):
    path = rewritten(tmp_path, lambda entries: entries.update({"a/data/9": b"0" * 24}))
    path.write_bytes(path.read_bytes().replace(b"a/data/9", b"a/data/0"))
    with pytest.raises(InputError, match="an entry is there twice"):
        read(path)


def test_a_compressed_archive_is_refused(tmp_path):
    source = saved(tmp_path, as_torch(tensors()))
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with pytest.raises(InputError, match="uncompressed"):
        read(tmp_path / "b.pt")


def test_what_is_no_file_of_torch_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack("<Q", 8) + b"{}      ")
    with pytest.raises(InputError, match="no file of PyTorch"):
        read(tmp_path / "a")


def test_a_state_dict_is_written_under_a_name_with_what_belongs_to_it(tmp_path):
    arrays = tensors()
    rest = {"step": 3, "lr": 0.5, "names": ["a", ("b", None)], "big": 1 << 40, "on": True, "d": {}}
    path = write(
        FileWriter, tmp_path / "x.pt", arrays, arrange=lambda tensors: {"model": tensors, **rest}
    )
    loaded = torch.load(path, weights_only=True)
    assert {name: value for name, value in loaded.items() if name != "model"} == rest
    assert_same({name: from_torch(t) for name, t in loaded["model"].items()}, arrays)


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    with pytest.raises(InputError, match=r"no dtype float8_e3m4 \(of a\)"):
        write(FileWriter, tmp_path / "x.pt", {"a": np.ones(2, ml_dtypes.float8_e3m4)})
    with pytest.raises(ValueError, match="cannot be written"):
        write(FileWriter, tmp_path / "x.pt", {"a": np.ones(2)}, arrange=lambda _: object())
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jax_transformer.porting.formats.base.write_all", full)
    with pytest.raises(InputError, match="No space left on device"):
        write(FileWriter, tmp_path / "x.pt", {"a": np.ones(1000)})
    assert not list(tmp_path.iterdir())


def test_torch_is_not_needed(tmp_path):
    write(FileWriter, tmp_path / "x.pt", tensors())
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from jax_transformer.porting.formats.torch_file import read\n"
        f"print([t.read().shape for t in read(Path({str(tmp_path / 'x.pt')!r})).tensors.values()])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[(2, 3), (3,)]", result.stderr


def test_lazy_tensors_do_not_read_until_asked(tmp_path):
    path = saved(tmp_path, as_torch(tensors()))
    tensor = read(path).tensors["w"]
    assert isinstance(tensor, LazyTensor)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        tensor.read()
