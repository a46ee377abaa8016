"""GGUF: what the `gguf` package wrote is read; quantised blocks become its own float32."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.gguf_file import BLOCKS, PLAIN, read
from parity_tests.porting.formats.tensors import assert_same, assert_same_bits, random_bits

gguf = pytest.importorskip("gguf")

PLAIN_TENSORS = {
    "blk.0.weight": random_bits((3, 4, 5), np.float32),
    "half": random_bits((7,), np.float16),
    "count": random_bits((2, 2), np.int32),
    "wide": random_bits((3,), np.float64),
}


def saved(path, tensors=PLAIN_TENSORS, quantised=()):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_add_bos_token(True)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for name, data, kind in quantised:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_floats_are_read_bit_for_bit(tmp_path):
    checkpoint = read(saved(tmp_path / "a.gguf"))
    assert_same({n: t.read() for n, t in checkpoint.tensors.items()}, PLAIN_TENSORS)
    assert checkpoint.tensors["blk.0.weight"].shape == (3, 4, 5)


def test_bfloat16_is_read_bit_for_bit(tmp_path):
    import ml_dtypes

    values = random_bits((4, 6), ml_dtypes.bfloat16)
    kind = gguf.GGMLQuantizationType.BF16
    path = saved(tmp_path / "a.gguf", {}, [("w", values.view(np.uint8), kind)])
    assert_same_bits(read(path).tensors["w"].read(), values)


def test_metadata_is_the_config(tmp_path):
    config = read(saved(tmp_path / "a.gguf")).config
    assert config["general.architecture"] == "llama"
    assert config["llama.context_length"] == 128
    assert config["llama.rope.freq_base"] == 10000.5
    assert config["tokenizer.ggml.tokens"] == ["a", "b", "é"]
    assert config["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    assert config["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: BLOCKS[kind][0])
def test_quantised_types_are_dequantised_as_the_package_does(tmp_path, kind, monkeypatch):
    name, elements, nbytes = BLOCKS[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (elements, nbytes)
    assert gguf.GGMLQuantizationType(kind).name == name
    # Finite scales: random bits would be NaN here and there.
    data = np.random.default_rng(kind).integers(0, 60, (6, 2 * nbytes), np.uint8)
    path = saved(tmp_path / "a.gguf", {}, [("w", data, gguf.GGMLQuantizationType(kind))])
    tensor = read(path).tensors["w"]
    assert (tensor.shape, tensor.dtype, tensor.stored) == ((6, 2 * elements), np.float32, name)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(kind))
    assert np.isfinite(expected).all()
    assert np.ptp(expected)
    assert_same_bits(tensor.read(), expected)
    # In blocks of rows as well.
    monkeypatch.setattr("jax_transformer.porting.formats.gguf_file.ROWS", 2 * elements)
    assert_same_bits(tensor.read(), expected)


def test_known_types_have_the_numbers_of_the_package():
    for number, dtype in PLAIN.items():
        kind = gguf.GGMLQuantizationType(number)
        assert gguf.GGML_QUANT_SIZES[kind] == (1, dtype.itemsize), kind


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    path = saved(tmp_path / "a.gguf", {"one": np.ones(3), "two": np.ones(3)})
    path.write_bytes(path.read_bytes().replace(b"two", b"one"))
    with pytest.raises(InputError, match="one is there twice"):
        read(path)


def test_types_that_are_not_known_are_refused_by_number(tmp_path):
    kind = gguf.GGMLQuantizationType.IQ1_S
    data = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    with pytest.raises(InputError, match="w has the type number 19, known are floats, Q4_0"):
        read(saved(tmp_path / "a.gguf", {}, [("w", data, kind)]))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path, data):
    path = tmp_path / "a.gguf"
    whole = (path if path.exists() else saved(path)).read_bytes()
    # The last tensor's padding may go.
    (tmp_path / "cut").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 32))])
    with pytest.raises(InputError):
        read(tmp_path / "cut")


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGML", "no GGUF file"),
        (b"GGUF\x01\0\0\0", "GGUF version 1, must be 2 or 3"),
        (b"GGUF\0\0\0\x03", "must be 2 or 3, little-endian"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path, start, message):
    path = saved(tmp_path / "a.gguf")
    path.write_bytes(start + path.read_bytes()[len(start) :])
    with pytest.raises(InputError, match=message):
        read(path)
