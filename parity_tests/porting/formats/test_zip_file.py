"""Stored archives: what the standard library and PyTorch read, large ones too."""

import collections
import zipfile

import numpy as np
import pytest
import torch

from jax_transformer.porting.formats import torch_file, zip_file
from jax_transformer.porting.formats.zip_file import StoredZip
from parity_tests.porting.formats.tensors import assert_same, random_bits, read_all, write

CONTENT = {"a/empty": b"", "a/short": b"12345", "b/é": bytes(range(256)) * 5, "last": b"x"}


def saved(path, order=tuple(CONTENT)):
    archive = StoredZip(path, {name: len(data) for name, data in CONTENT.items()})
    archive.open()
    for name in order:
        archive.write(name, memoryview(CONTENT[name]))
    archive.finish()
    archive.release()
    return path


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 1000, 1])
@pytest.mark.parametrize("order", [tuple(CONTENT), tuple(reversed(CONTENT))])
def test_the_standard_library_reads_every_entry(tmp_path, monkeypatch, limit, order):
    # A lower limit makes small archives use the fields of 64 bits.
    monkeypatch.setattr(zip_file, "LIMIT", limit)
    with zipfile.ZipFile(saved(tmp_path / "a", order)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == CONTENT


def test_every_entry_is_aligned(tmp_path):
    path = saved(tmp_path / "a")
    whole = path.read_bytes()
    for data in CONTENT.values():
        assert len(data) < 5 or whole.index(data) % 64 == 0


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 1000, 1])
def test_torch_reads_large_archives(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(zip_file, "LIMIT", limit)
    arrays = {f"w{n}": random_bits((n, 7), np.float32, n) for n in range(1, 60)}
    path = write(torch_file.FileWriter, tmp_path / "a.pt", arrays)
    loaded = torch.load(path, weights_only=True)
    assert isinstance(loaded, collections.OrderedDict)
    assert_same({name: tensor.numpy() for name, tensor in loaded.items()}, arrays)
    assert_same(read_all(torch_file.read(path)), arrays)


def test_an_archive_without_its_end_is_none(tmp_path):
    archive = StoredZip(tmp_path / "a", {"a": 3})
    archive.open()
    archive.write("a", memoryview(b"123"))
    archive.release()
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(tmp_path / "a")
