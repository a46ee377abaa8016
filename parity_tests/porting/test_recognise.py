"""Formats are recognised by content, families by config or names."""

import json

import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.porting.formats import huggingface, meta, orbax_run, safetensors_file
from jax_transformer.porting.formats import torch_file as torch_format
from jax_transformer.porting.recognise import (
    SIGNATURES,
    Recognised,
    format_of,
    open_checkpoint,
    recognise,
)
from parity_tests.porting.formats.tensors import write

LLAMA = {
    "model.layers.0.self_attn.q_proj.weight": np.ones((2, 2), np.float32),
    "model.layers.0.mlp.gate_proj.weight": np.ones((2, 2), np.float32),
}


def test_files_are_known_by_what_they_begin_with_whatever_they_are_called(tmp_path):
    write(safetensors_file.FileWriter, tmp_path / "a.bin", LLAMA)
    write(torch_format.FileWriter, tmp_path / "b.safetensors", LLAMA)
    torch.save({"a": torch.zeros(1)}, tmp_path / "c", _use_new_zipfile_serialization=False)
    assert recognise(tmp_path / "a.bin") == Recognised("safetensors", "llama")
    assert recognise(tmp_path / "b.safetensors") == Recognised("pt", "llama")
    assert recognise(tmp_path / "c") == Recognised("pt", None)


def test_folders_are_known_by_the_files_in_them(tmp_path):
    config = {"model_type": "mistral"}
    write(huggingface.FolderWriter, tmp_path / "hf", LLAMA, config=config)
    write(meta.FolderWriter, tmp_path / "meta", {"norm.weight": np.ones(2)}, config={"dim": 2})
    write(orbax_run.FolderWriter, tmp_path / "run", LLAMA, config={"family": "t5"})
    write(orbax_run.FolderWriter, tmp_path / "old", LLAMA, config={"model": {}})
    (tmp_path / "plain").mkdir()
    write(safetensors_file.FileWriter, tmp_path / "plain" / "model.safetensors", LLAMA)
    assert recognise(tmp_path / "hf") == Recognised("huggingface", "mistral")
    assert recognise(tmp_path / "meta") == Recognised("meta", "llama")
    assert recognise(tmp_path / "run") == Recognised("orbax", "t5")
    assert recognise(tmp_path / "old") == Recognised("orbax", "transformer")
    assert recognise(tmp_path / "plain") == Recognised("safetensors", "llama")


def test_gguf_says_its_family(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a", "gemma2")
    writer.add_tensor("a", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert recognise(tmp_path / "a") == Recognised("gguf", "gemma2")


def test_a_file_beside_a_config_has_that_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    write(safetensors_file.FileWriter, tmp_path / "x.safetensors", LLAMA)
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.config == {"model_type": "olmo2"}
    assert [path.name for path in checkpoint.companions] == ["tokenizer.json"]
    assert recognise(tmp_path / "x.safetensors").family == "olmo2"


def test_a_folder_of_shards_without_a_config_goes_by_its_index(tmp_path):
    write(safetensors_file.FileWriter, tmp_path / "s", LLAMA)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(LLAMA, "s")}))
    assert open_checkpoint(tmp_path).tensors.keys() == LLAMA.keys()
    assert open_checkpoint(index).tensors.keys() == LLAMA.keys()


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\0" * 100])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=r"no file of safetensors, PyTorch or GGUF"):
        format_of(tmp_path / "a")
    with pytest.raises(InputError, match=r"is no folder of a model"):
        format_of(tmp_path)
    with pytest.raises(InputError, match=r"cannot be read"):
        format_of(tmp_path / "absent")


MODELS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "marian": "MarianMTModel",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


def test_each_family_has_names_of_its_own():
    assert {family for family, *_ in SIGNATURES} == {*MODELS, "transformer"}


@pytest.mark.parametrize("family", MODELS)
def test_a_state_dict_without_a_config_is_known_by_its_names(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, MODELS[family])
    with torch.device("meta"):
        names = model(model.config_class()).state_dict()
    state = {name: np.zeros((), np.int8) for name in names}
    write(safetensors_file.FileWriter, tmp_path / "a", state)
    assert recognise(tmp_path / "a") == Recognised("safetensors", family)
    wrapped = {f"module._orig_mod.{name}": array for name, array in state.items()}
    write(torch_format.FileWriter, tmp_path / "b", wrapped)
    assert recognise(tmp_path / "b") == Recognised("pt", family)
