"""Folders of `transformers`: read as it writes them, written as it loads them."""

import json

import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import safetensors_file
from jax_transformer.porting.formats.base import header_of
from jax_transformer.porting.formats.huggingface import FolderWriter, read, shard_names
from parity_tests.porting.formats.tensors import (
    assert_same,
    from_torch,
    leftovers,
    random_bits,
    read_all,
    write,
)

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 20}


@pytest.fixture(scope="module")
def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(**CONFIG, n_positions=8, bos_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config).eval()


def state_of(model):
    """What `save_pretrained` writes: tied tables once."""
    state = {name: from_torch(tensor) for name, tensor in model.state_dict().items()}
    del state["lm_head.weight"]
    return state


@pytest.mark.parametrize("size", ["100GB", "5KB"])
def test_a_saved_model_is_read(tmp_path, gpt2, size):
    gpt2.save_pretrained(tmp_path, max_shard_size=size)
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = read(tmp_path)
    assert_same(read_all(checkpoint), state_of(gpt2))
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.config["model_type"] == "gpt2"
    names = {path.name for path in checkpoint.companions}
    assert names == {"generation_config.json", "tokenizer.json"}


def test_a_written_folder_loads_with_no_missing_and_no_unexpected_key(tmp_path, gpt2):
    transformers = pytest.importorskip("transformers")
    gpt2.save_pretrained(tmp_path / "a")
    source = read(tmp_path / "a")
    for number, most in enumerate((10**9, 3000)):
        path = tmp_path / f"b{number}"
        write(
            FolderWriter,
            path,
            read_all(source),
            config=source.config,
            companions=source.companions,
            shard_bytes=most,
        )
        assert (path / "generation_config.json").is_file()
        assert (path / "model.safetensors").is_file() == (most == 10**9)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(state_of(loaded), state_of(gpt2))
        assert_same(read_all(read(path)), state_of(gpt2))


@pytest.mark.parametrize("shards", [1, 2])
def test_old_folders_of_pickles_are_read(tmp_path, gpt2, shards):
    state = {n: t.clone() for n, t in gpt2.state_dict().items()}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = list(state)
    if shards == 1:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        places = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
        for file in set(places.values()):
            torch.save({n: state[n] for n in names if places[n] == file}, tmp_path / file)
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(read_all(read(tmp_path)), {n: from_torch(t) for n, t in state.items()})


def folder(path, tensors=None, most=10**9):
    tensors = tensors or {name: random_bits((4, 2), np.float32) for name in "abcd"}
    return write(FolderWriter, path, tensors, config=CONFIG, shard_bytes=most)


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own():
    headers = {
        name: header_of(np.zeros(size, np.uint8))
        for name, size in zip("abcd", (4, 5, 20, 1), strict=True)
    }
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 1, 2, 3)]
    assert list(shard_names(headers, 10).values()) == files
    assert set(shard_names(headers, 30).values()) == {"model.safetensors"}
    assert set(shard_names({}, 30).values()) == set()


def test_a_missing_shard_is_named(tmp_path):
    folder(tmp_path / "m", most=40)
    (tmp_path / "m" / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(InputError, match=r"names model-00002-of-00004\.safetensors: not there"):
        read(tmp_path / "m")


def test_shards_without_their_index_are_refused(tmp_path):
    folder(tmp_path / "m", most=40)
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match="no index of its shards"):
        read(tmp_path / "m")


def test_a_stale_index_is_refused(tmp_path):
    folder(tmp_path / "m", most=40)
    shard = tmp_path / "m" / "model-00002-of-00004.safetensors"
    shard.unlink()
    write(safetensors_file.FileWriter, shard, {"renamed": np.ones(3)})
    with pytest.raises(InputError, match=r"lacks b; .* has renamed, which must be in no file"):
        read(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "is not valid JSON"),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", '{"a": 1, "a": 2}', "a is there twice"),
        ("config.json", None, "cannot be read"),
        ("model.safetensors", None, "has neither model.safetensors nor pytorch_model.bin"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(tmp_path, name, text, message):
    path = folder(tmp_path / "m")
    (path / name).unlink()
    if text is not None:
        (path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(path)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    array = np.ones(3)
    with pytest.raises(KeyboardInterrupt):
        interrupt(FolderWriter(tmp_path / "m", dict.fromkeys("ab", header_of(array)), config={}))
    assert not list(tmp_path.iterdir())


def interrupt(writer):
    with writer:
        writer.add("a", np.ones(3))
        assert leftovers(writer.path.parent)
        raise KeyboardInterrupt


def test_a_companion_that_cannot_be_copied_leaves_nothing(tmp_path):
    tensors = {"a": np.ones(3)}
    with pytest.raises(InputError, match="cannot be written"):
        write(FolderWriter, tmp_path / "m", tensors, config={}, companions=[tmp_path / "absent"])
    assert not list(tmp_path.iterdir())
