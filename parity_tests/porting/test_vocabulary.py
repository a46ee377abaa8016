"""A tokenizer that is not the model's is seen before anything is written."""

import json
from typing import Any

import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.porting.identify import identify
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.vocabulary import check_vocabulary
from parity_tests.porting.families import test_bert, test_llama, test_marian

TOKENIZERS: dict[str, Any] = {
    "tokenizer.json": lambda count: {"model": {"vocab": {f"w{i}": i for i in range(count)}}},
    "tokenizer.json, scored": lambda count: {"model": {"vocab": [["w", -1.0]] * count}},
    "vocab.json": lambda count: {f"w{i}": i for i in range(count)},
    "vocab.txt": lambda count: "".join(f"w{i}\n" for i in range(count)),
}


def checked(folder, files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.split(",")[0]).write_text(text)
    return check_vocabulary(identify(open_checkpoint(folder)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder, an encoder, and an encoder-decoder of two vocabularies."""
    path = tmp_path_factory.mktemp("models")
    examples = test_llama.EXAMPLES[0], test_bert.HEAD, test_marian.EXAMPLES[1]
    for name, example in zip(("llama", "bert", "marian"), examples, strict=True):
        example.model(torch.bfloat16).save_pretrained(path / name)
    return path


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("model", "size"), [("llama", 31), ("bert", 31), ("marian", 36)])
def test_every_token_needs_a_row(name, model, size, folders, tmp_path):
    folder = copied(folders / model, tmp_path)
    for count in (size - 3, size):
        assert checked(folder, {name: TOKENIZERS[name](count)}) == ()
    message = f"has a token with the id {size}, but the model has {size} of them"
    with pytest.raises(InputError, match=message):
        checked(folder, {name: TOKENIZERS[name](size + 1)})


def test_each_side_has_its_vocabulary(folders, tmp_path):
    folder = copied(folders / "marian", tmp_path)
    whole = {"vocab.json": TOKENIZERS["vocab.json"](36)}
    assert checked(folder, whole | {"target_vocab.json": TOKENIZERS["vocab.json"](52)}) == ()
    with pytest.raises(InputError, match=r"target_vocab\.json has a token with the id 52"):
        checked(folder, {"target_vocab.json": TOKENIZERS["vocab.json"](53)})


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json"])
def test_added_tokens_without_a_row_are_worth_a_word(name, folders, tmp_path):
    folder = copied(folders / "llama", tmp_path)
    content = {"<image>": 31}
    if name == "tokenizer.json":
        content = TOKENIZERS[name](31) | {"added_tokens": [{"id": 31, "content": "<image>"}]}
    (note,) = checked(folder, {name: content})
    assert note.endswith("but the model has 31: texts with them are refused")


def copied(source, target):
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target
