"""Meta's shards: joined and cut along the axes of its parallel layers."""

import json

import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.porting.formats.meta import FolderWriter, read
from parity_tests.porting.formats.tensors import (
    assert_same,
    random_bits,
    read_all,
    to_torch,
    write,
)

DIM, HIDDEN, VOCAB, KV_HEADS, HEAD = 8, 12, 20, 4, 2
PARAMS = {"dim": DIM, "n_layers": 1, "n_heads": 4, "n_kv_heads": KV_HEADS, "vocab_size": -1}

WHOLE = {
    "tok_embeddings.weight": (VOCAB, DIM),
    "norm.weight": (DIM,),
    "output.weight": (VOCAB, DIM),
    "layers.0.attention.wq.weight": (DIM, DIM),
    "layers.0.attention.wk.weight": (KV_HEADS * HEAD, DIM),
    "layers.0.attention.wv.weight": (KV_HEADS * HEAD, DIM),
    "layers.0.attention.wo.weight": (DIM, DIM),
    "layers.0.feed_forward.w1.weight": (HIDDEN, DIM),
    "layers.0.feed_forward.w2.weight": (DIM, HIDDEN),
    "layers.0.feed_forward.w3.weight": (HIDDEN, DIM),
    "layers.0.attention_norm.weight": (DIM,),
    "layers.0.ffn_norm.weight": (DIM,),
    "rope.freqs": (1,),
}
BY_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
BY_COLUMNS = ("wo", "w2")


def tensors():
    import ml_dtypes

    return {
        name: random_bits(shape, ml_dtypes.bfloat16, number)
        for number, (name, shape) in enumerate(WHOLE.items())
    }


def cut(name, array, count, embedding):
    """The shards of a tensor, written down independently of the code."""
    parts = name.split(".")
    if name == "tok_embeddings.weight":
        return np.split(array, count, axis=0 if embedding == "rows" else 1)
    if parts[-2] in BY_ROWS:
        return np.split(array, count, axis=0)
    if parts[-2] in BY_COLUMNS:
        return np.split(array, count, axis=1)
    return [array] * count


def folder(path, count, embedding="rows", change=None):
    path.mkdir()
    (path / "params.json").write_text(json.dumps(PARAMS))
    shards = [{} for _ in range(count)]
    for name, array in tensors().items():
        for shard, part in zip(shards, cut(name, array, count, embedding), strict=True):
            shard[name] = to_torch(np.ascontiguousarray(part))
    if change:
        change(shards)
    for number, shard in enumerate(shards):
        torch.save(shard, path / f"consolidated.{number:02d}.pth")
    return path


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("embedding", ["rows", "columns"])
def test_shards_join_to_the_whole_bit_for_bit(tmp_path, count, embedding):
    checkpoint = read(folder(tmp_path / "m", count, embedding))
    assert_same(read_all(checkpoint), tensors())
    assert checkpoint.config == PARAMS
    assert checkpoint.metadata == {"shards": count}
    elements = sum(np.prod(shape) for shape in WHOLE.values())
    assert sum(np.prod(tensor.shape) for tensor in checkpoint.tensors.values()) == elements


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_written_shards_are_those_of_meta(tmp_path, count, axis):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_text("tokens")
    path = write(
        FolderWriter,
        tmp_path / "m",
        tensors(),
        config=PARAMS,
        companions=[tokenizer],
        shards=count,
        embedding_axis=axis,
    )
    for number in range(count):
        shard = torch.load(path / f"consolidated.{number:02d}.pth", weights_only=True)
        for name, array in tensors().items():
            part = cut(name, array, count, ("rows", "columns")[axis])[number]
            assert torch.equal(
                shard[name].view(torch.uint8), to_torch(part.copy()).view(torch.uint8)
            ), name
    checkpoint = read(path)
    assert_same(read_all(checkpoint), tensors())
    assert [file.read_text() for file in checkpoint.companions] == ["tokens"]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_missing_shard_is_refused(tmp_path, lost):
    path = folder(tmp_path / "m", 4)
    (path / f"consolidated.{lost:02d}.pth").unlink()
    with pytest.raises(InputError, match="copy all the shards"):
        read(path)
    for file in path.glob("*.pth"):
        file.unlink()
    with pytest.raises(InputError, match=r"no consolidated\.00\.pth"):
        read(path)


def test_norms_that_differ_between_shards_are_refused(tmp_path):
    def change(shards):
        shards[1]["norm.weight"] = shards[1]["norm.weight"].clone()
        shards[1]["norm.weight"].view(torch.int16)[0] ^= 1

    checkpoint = read(folder(tmp_path / "m", 2, change=change))
    with pytest.raises(InputError, match=r"norm\.weight of shard 1 differs from that of shard 0"):
        checkpoint.tensors["norm.weight"].read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1].pop("norm.weight"), r"consolidated\.01\.pth lacks norm\.weight"),
        (lambda s: s[1].update({"rope.freqs": torch.zeros(2)}), "shards of rope.freqs are"),
        (
            lambda s: [shard.update({"adapter.weight": torch.zeros(2)}) for shard in s],
            r"how the shards of adapter\.weight join is not known",
        ),
    ],
)
def test_shards_that_do_not_fit_each_other_are_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read(folder(tmp_path / "m", 2, change=change))


def test_what_cannot_be_cut_evenly_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="cannot be cut into 3 equal shards along axis 0"):
        write(FolderWriter, tmp_path / "m", tensors(), config=PARAMS, shards=3)
    with pytest.raises(InputError, match="how the shards of x join is not known"):
        write(FolderWriter, tmp_path / "m", {"x": np.ones(2)}, config=PARAMS)
    assert not list(tmp_path.iterdir())
