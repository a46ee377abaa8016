"""Folders of `transformers` as the reference, whatever their kind of model."""

import json
import shutil

import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.verification import verify
from parity_tests.porting.families import (
    test_bart,
    test_bert,
    test_gpt2,
    test_marian,
    test_roberta,
    test_t5,
    test_whisper,
)

EXAMPLES = {
    "BART": test_bart.EXAMPLES[0],
    "BERT": test_bert.EXAMPLES[0],
    "GPT-2": test_gpt2.EXAMPLES[0],
    "Marian": test_marian.EXAMPLES[0],
    "RoBERTa, bare": test_roberta.EXAMPLES[2],
    "T5": test_t5.EXAMPLES[0],
    "Whisper": test_whisper.EXAMPLES[0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")

    def of(name):
        path = root / name
        if not path.exists():
            EXAMPLES[name].model(torch.float32).save_pretrained(path)
        return path

    return of


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_folder_is_the_same_as_itself_at_every_module(name, folder):
    backward = name in ("BERT", "T5")
    report = verify(folder(name), folder(name), dtype=None, backward=backward)
    assert report.same, report.verdict
    # The second layer and what is in it have been seen.
    assert len([point for point in report.errors if "layers.1" in point]) >= 10
    assert (len(report.gradients) >= 20) == backward


@pytest.mark.parametrize("name", ["BERT", "T5"])
def test_another_weight_is_found_in_its_module(name, folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    changed = tmp_path / "changed"
    shutil.copytree(folder(name), changed)
    tensors = load_file(changed / "model.safetensors")
    wanted = {
        "BERT": "layer.1.attention.self.query.weight",
        "T5": "block.1.layer.0.SelfAttention.q",
    }
    (key,) = [key for key in tensors if wanted[name] in key and "decoder" not in key]
    tensors[key] = tensors[key] * np.float32(1.001)
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    report = verify(folder(name), changed, dtype=None)
    assert report.diagnoses[0].module.endswith("layers.1.self_attn.q_proj")


def test_another_kind_of_model_is_refused(folder):
    with pytest.raises(InputError, match="EncoderOnlyConfig, the other of DecoderOnlyConfig"):
        verify(folder("GPT-2"), folder("BERT"), dtype=None)


def test_a_folder_that_transformers_cannot_load_is_one_line(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder("GPT-2"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"n_head": 5}))
    with pytest.raises(InputError) as error:
        verify(folder("GPT-2"), broken, dtype=None)
    assert "\n" not in str(error.value)
