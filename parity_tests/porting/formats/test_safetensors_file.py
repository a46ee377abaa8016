"""safetensors: bit for bit what the `safetensors` package reads and writes, or refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import base
from jax_transformer.porting.formats.safetensors_file import FileWriter, read
from parity_tests.porting.formats.tensors import (
    FLOATS,
    OTHERS,
    SHAPES,
    assert_same,
    assortment,
    from_torch,
    leftovers,
    random_bits,
    read_all,
    to_torch,
    write,
)


def saved(tmp_path, tensors=None):
    path = tmp_path / "a.safetensors"
    return write(FileWriter, path, tensors or {"a": np.arange(6.0), "b": np.ones((2, 3))})


def test_every_dtype_and_shape_is_read_as_the_package_wrote_it(tmp_path):
    tensors = assortment()
    save_file({n: to_torch(a) for n, a in tensors.items()}, tmp_path / "a", {"format": "pt"})
    checkpoint = read(tmp_path / "a")
    assert_same(read_all(checkpoint), tensors)
    assert checkpoint.metadata == {"format": "pt"}


def test_every_dtype_and_shape_is_written_as_the_package_reads_it(tmp_path):
    tensors = assortment()
    path = saved(tmp_path, tensors)
    assert_same({n: from_torch(t) for n, t in load_file(path).items()}, tensors)
    assert_same(read_all(read(path)), tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from([*FLOATS, *OTHERS])), max_size=6)
)
def test_any_mixture_goes_there_and_back(tmp_path, mixture):
    tensors = {f"t{i}": random_bits(shape, dtype, i) for i, (shape, dtype) in enumerate(mixture)}
    path = tmp_path / "a"
    path.unlink(missing_ok=True)
    write(FileWriter, path, tensors)
    assert_same(read_all(read(path)), tensors)


def test_strided_views_are_written_as_the_numbers_that_they_show(tmp_path):
    # Writers that dump raw memory would write 0 1 2 3 4 5.
    a = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    tensors = {"transposed": a.T, "every second": np.arange(6)[::2], "backwards": a[::-1]}
    loaded = load_file(saved(tmp_path, tensors))
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name].numpy(), array)
    assert loaded["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_bfloat16_stays_bfloat16(tmp_path):
    values = np.array([1.0, 2.5, -0.0, np.nan], ml_dtypes.bfloat16)
    save_file({"a": to_torch(values)}, tmp_path / "a")
    found = read(tmp_path / "a").tensors["a"].read()
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), values.view(np.uint16))


def test_tensors_are_mapped_and_cannot_be_written_to(tmp_path):
    array = read(saved(tmp_path)).tensors["a"].read()
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_every_tensor_is_aligned(tmp_path):
    tensors = {"a": random_bits((3,), np.uint8), "b": random_bits((3,), np.float64)}
    assert all(array.flags.aligned for array in read_all(read(saved(tmp_path, tensors))).values())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused_before_a_tensor_is_read(tmp_path, data):
    path = tmp_path / "a.safetensors"
    whole = path.read_bytes() if path.exists() else saved(tmp_path).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InputError, match=r"is cut off: it has .* copy or download it again"):
        read(tmp_path / "cut")


def test_a_file_that_is_cut_off_after_it_was_opened_is_refused(tmp_path):
    path = saved(tmp_path)
    tensor = read(path).tensors["b"]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="is cut off"):
        tensor.read()


def file_with(tmp_path, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return tmp_path / "a"


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not one of safetensors"),
        (b"[]", "not one of safetensors"),
        (b'{"a": 1}', "not one of safetensors"),
        ({"a": entry(dtype="F31")}, "dtype 'F31' is not among"),
        ({"a": entry(shape=[3])}, r"F32 \[3\] does not take 8 bytes"),
        ({"a": entry(shape=[-2])}, "a number that is not one"),
        ({"a": entry(data_offsets=[0, 16], shape=[4])}, "is cut off"),
        ({"a": entry(data_offsets=[4, 8], shape=[1])}, "a starts at byte 4, but must start at 0"),
        ({"a": entry(), "b": entry()}, "b starts at byte 0, but must start at 8"),
        ({"a": entry(data_offsets=[0, 4], shape=[1])}, "speaks of .* only"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "a is there twice",
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    with pytest.raises(InputError, match=message) as refusal:
        read(file_with(tmp_path, header))
    assert str(tmp_path / "a") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_dtype_that_the_format_has_not_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"no dtype complex128 \(of c\)"):
        saved(tmp_path, {"c": np.ones(2, complex)})
    assert not list(tmp_path.iterdir())


def test_an_unreadable_file_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "absent")


def begin(path, meanwhile):
    """A file of which something happens before its only tensor is added."""
    array = np.ones(3)
    with FileWriter(path, {"a": base.header_of(array)}) as writer:
        assert leftovers(path.parent)
        assert not path.exists()
        meanwhile()
        writer.add("a", array)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "x", interrupt)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_was_promised_must_come(tmp_path):
    headers = {"a": base.header_of(np.ones(3))}
    with (
        pytest.raises(ValueError, match="a has not been added"),
        FileWriter(tmp_path / "x", headers),
    ):
        pass
    with (
        pytest.raises(ValueError, match="does not follow"),
        FileWriter(tmp_path / "x", headers) as w,
    ):
        w.add("a", np.ones(4))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="is there already"):
        saved(tmp_path)
    assert path.read_bytes() == before


def test_what_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(InputError, match="has appeared meanwhile"):
        begin(path, lambda: path.write_text("mine"))
    assert path.read_text() == "mine"
    assert not leftovers(tmp_path)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path):
    huge = base.Header((1 << 50,), np.dtype(np.float32))
    with pytest.raises(InputError, match=r"needs .* bytes, but its disk has"):
        FileWriter(tmp_path / "x", {"a": huge})
    with pytest.raises(InputError, match=r"the directory .* is not there"):
        FileWriter(tmp_path / "absent" / "x", {})


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    place = "jax_transformer.porting.formats.base.write_all"
    with pytest.raises(InputError, match=r"No space left on device.*: free some space"):
        begin(tmp_path / "x", lambda: monkeypatch.setattr(place, full))
    assert not list(tmp_path.iterdir())


def sharded(tmp_path):
    tensors = {"a": np.arange(4.0), "b": np.arange(3), "c": np.ones((2, 2), np.float16)}
    write(FileWriter, tmp_path / "m-1.safetensors", {"a": tensors["a"]})
    write(FileWriter, tmp_path / "m-2.safetensors", {n: tensors[n] for n in "bc"})
    index = tmp_path / "model.safetensors.index.json"
    places = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 64}, "weight_map": places}))
    return index, tensors, places


def test_shards_are_one_checkpoint(tmp_path):
    index, tensors, _ = sharded(tmp_path)
    checkpoint = read(index)
    assert_same(read_all(checkpoint), tensors)
    assert checkpoint.metadata == {"total_size": 64}


def test_a_missing_shard_is_named(tmp_path):
    index, _, _ = sharded(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"names m-2\.safetensors: not there"):
        read(index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": "m-1.safetensors"}, r"m-1\.safetensors lacks d"),
        ({"b": "m-1.safetensors"}, r"m-1\.safetensors lacks b"),
        ({"c": None}, r"m-2\.safetensors has c, which must be in no file"),
        ({"a": "../m-1.safetensors"}, "files must be names in the same folder"),
        ({"a": 1}, "files must be names in the same folder"),
    ],
)
def test_an_index_of_another_checkpoint_is_refused(tmp_path, changes, message):
    index, _, places = sharded(tmp_path)
    places = {name: file for name, file in (places | changes).items() if file is not None}
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=message):
        read(index)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    index, _, _ = sharded(tmp_path)
    (tmp_path / "m-1.safetensors").unlink()
    write(FileWriter, tmp_path / "m-1.safetensors", {"a": np.arange(4.0), "b": np.arange(3)})
    with pytest.raises(
        InputError, match=r"m-1\.safetensors has b, which must be in m-2\.safetensors"
    ):
        read(index)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}', '{"a":1,"a":2}'])
def test_what_is_no_index_is_refused(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(InputError, match="not the index of a sharded checkpoint"):
        read(index)
