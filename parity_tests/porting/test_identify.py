"""What model a checkpoint holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer.config import DecoderOnlyConfig, ModelConfig
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import flatten
from jax_transformer.porting.families import FAMILIES, gpt2, llama, llama_gguf, llama_meta
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.formats.base import Checkpoint, LazyTensor
from jax_transformer.porting.identify import (
    family_named,
    first_family,
    identify,
    keeps_buffers,
    layout,
    leaf_shapes,
    skeleton,
)
from parity_tests.porting.checkpoints import GPT2, LLAMA
from parity_tests.porting.families import (
    test_bert,
    test_gemma3,
    test_marian,
    test_t5,
    test_whisper,
)

PATH = Path("model")


def lazy(shape: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(shape, np.dtype(np.float32), lambda: np.zeros(shape, np.float32))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_goes_by_its_name_and_by_its_model_types(family):
    assert all(family_named(n, PATH) is family for n in (family.name, *family.model_types))


@pytest.mark.parametrize("example", [LLAMA, GPT2], ids=str)
def test_a_model_trained_here_has_the_first_family_that_can_express_it(example):
    config = read_config(example.family, example.values)
    assert first_family(config, PATH) is example.family


def test_a_model_that_no_family_can_express_is_refused():
    config: Any = read_config(LLAMA.family, LLAMA.values)
    odd = DecoderOnlyConfig(
        vocab_size=8, layer=config.layer, num_layers=2, position="rotary", embedding_norm=True
    )
    with pytest.raises(InputError, match="has a config for this model"):
        first_family(odd, PATH)


def test_names_depend_on_family_and_format():
    assert layout(llama.FAMILY, "meta") is llama_meta.FAMILY
    assert layout(llama.FAMILY, "gguf") is llama_gguf.FAMILY
    assert layout(gpt2.FAMILY, "pt") is gpt2.FAMILY
    with pytest.raises(InputError, match="gpt2 in the format meta is not known"):
        layout(gpt2.FAMILY, "meta")


@pytest.mark.parametrize(
    "example",
    [
        test_gemma3.EXAMPLES[0],
        test_bert.HEAD,
        test_t5.EXAMPLES[0],
        test_marian.EXAMPLES[1],
        test_whisper.EXAMPLES[0],
    ],
    ids=lambda example: example.family.name,
)
def test_shapes_of_leaves_are_those_of_the_model(example):
    config = read_config(example.family, example.values)
    _, params, buffers = skeleton(config)
    whole = flatten(params) | (flatten(buffers) if keeps_buffers(config) else {})
    assert leaf_shapes(config) == {name: tuple(leaf.shape) for name, leaf in whole.items()}


def test_buffers_are_ported_where_files_have_them():
    shapes = leaf_shapes(ModelConfig(src_vocab_size=300, tgt_vocab_size=300))
    assert "encoder.pos_encoding.pe" in shapes


def test_one_of_our_directories_must_be_whole():
    config = read_config(GPT2.family, GPT2.values)
    tensors = {name: lazy(shape) for name, shape in leaf_shapes(config).items()}
    values = {"family": "gpt2", "model": config.to_dict()}
    whole = Checkpoint(path=PATH, format="orbax", tensors=tensors, config=values)
    assert identify(whole).config == config
    assert len(identify(whole).plan().moves) == len(tensors)
    for lost, message in ((None, "is missing"), (lazy((3,)), r"is \[3\]")):
        damaged = {n: t for n, t in tensors.items() if n != "norm.scale"}
        damaged |= {} if lost is None else {"norm.scale": lost}
        part = Checkpoint(path=PATH, format="orbax", tensors=damaged, config=values)
        with pytest.raises(InputError, match=rf"norm\.scale {message}, must be \[24\]"):
            identify(part).plan()
    with pytest.raises(InputError, match="--family llama: model holds a model of gpt2"):
        identify(whole, "llama")
    with pytest.raises(InputError, match="neither a task nor a family"):
        identify(Checkpoint(path=PATH, format="orbax", tensors=tensors, config={}))
