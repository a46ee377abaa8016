"""`from_pretrained` and `save_pretrained`."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer import InputError, from_pretrained, save_pretrained
from jax_transformer.models.parameters import flatten
from jax_transformer.training.run import load_best
from parity_tests import tiny
from parity_tests.porting.checkpoints import GPT2, LLAMA, TEXT, save, tokenizer
from parity_tests.porting.test_port import bits_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(LLAMA, tmp_path_factory.mktemp("llama") / "theirs", torch.bfloat16)


def test_each_parameter_keeps_its_dtype_unless_told_otherwise(folder):
    kept = flatten(from_pretrained(folder).params)
    assert {leaf.dtype for leaf in kept.values()} == {jnp.dtype(jnp.bfloat16)}
    cast = flatten(from_pretrained(folder, dtype="float32").params)
    for name, leaf in kept.items():
        assert cast[name].dtype == jnp.float32
        np.testing.assert_array_equal(cast[name], leaf.astype(jnp.float32))


def test_tokens_and_text_are_those_of_transformers(folder):
    found = from_pretrained(folder)
    words = tokenizer()
    assert found.tokenizer is not None
    for text in TEXT:
        ids = words.encode(text)
        assert found.tokenizer.encode(text) == ids
        assert found.tokenizer.decode(ids) == words.decode(ids, skip_special_tokens=True) == text
    assert found.rules.end_ids == (2,)


@pytest.mark.parametrize("to", [None, "orbax"])
@pytest.mark.parametrize("example", [LLAMA, GPT2], ids=str)
def test_what_is_saved_is_what_was_loaded(example, to, tmp_path):
    theirs = save(example, tmp_path / "theirs", torch.float16)
    save_pretrained(from_pretrained(theirs), tmp_path / "saved", to)
    if to is not None:
        save_pretrained(from_pretrained(tmp_path / "saved"), tmp_path / "again")
    saved = tmp_path / ("saved" if to is None else "again")
    assert bits_of(saved) == bits_of(theirs)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (saved / name).read_bytes() == (theirs / name).read_bytes()


def test_changed_parameters_are_those_saved(folder, tmp_path):
    found = from_pretrained(folder)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, found.params)
    save_pretrained(dataclasses.replace(found, params=doubled), tmp_path / "saved")
    build: Any = LLAMA.build
    model = build.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for name, tensor in LLAMA.model(torch.bfloat16).state_dict().items():
        assert torch.equal(model.state_dict()[name], 2 * tensor), name


def test_a_run_is_loaded_as_by_load_best():
    path = tiny.finished().path
    best, found = load_best(path), from_pretrained(path)
    assert found.config == best.config
    trees = (best.params, best.buffers), (found.params, found.buffers)
    jax.tree.map(np.testing.assert_array_equal, *trees)
    assert found.tokenizer is not None
    assert found.tokenizer.encode("a b") == best.tokenizer.encode("a b")
    with pytest.raises(InputError, match="holds no model that continues text"):
        found.generator()


def test_what_cannot_be_loaded_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="is float64, which JAX has only after"):
        from_pretrained(folder, dtype="float64")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        from_pretrained(bare).generator()
    (bare / "tokenizer.json").write_text(json.dumps({"model": {"type": "none"}}))
    with pytest.raises(InputError, match="is no tokenizer"):
        from_pretrained(bare)
    with pytest.raises(InputError, match="is there already"):
        save_pretrained(from_pretrained(folder), folder)


def test_they_are_imported_when_asked_for_and_without_torch():
    code = (
        "import sys, jax_transformer; assert 'jax' not in sys.modules;"
        "jax_transformer.from_pretrained;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'from_scratch'"):
        jax_transformer.from_scratch  # noqa: B018
