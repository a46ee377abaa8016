"""GGUF as a whole: weights, scaled rotations and the tokenizer of files that the `gguf` package
wrote, so that what is ported writes what the model wrote that they are of."""

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from jax_transformer.cli import main
from jax_transformer.porting.families import llama
from jax_transformer.porting.formats import gguf_tokenizer
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.porting.recognise import open_checkpoint
from jax_transformer.porting.text import PretrainedTokenizer
from parity_tests import tiny
from parity_tests.porting.checkpoints import VOCABULARY, tokenizer
from parity_tests.porting.families.harness import Example, float64, tokens
from parity_tests.porting.gguf_files import byte_level, sentencepiece, write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 2.0**-12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

TEXTS = (
    "the cat sat on the mat", "a dog", "1234 mats, the naïve café", "the  the   the\nin a sat",
    "</s>the<user>cat", "",
)  # fmt: skip
"""Repeated spaces, characters that are no token, special tokens; none begins with a space, where
SentencePiece and `transformers` differ."""


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


def example(**settings: Any) -> Example:
    config = LlamaConfig(**SIZES | settings)
    return Example(name="llama", family=llama.FAMILY, build=LlamaForCausalLM, config=config)


@pytest.mark.parametrize("fill", [byte_level, sentencepiece])
def test_a_prompt_is_continued_as_by_the_model_that_the_file_is_of(fill, tmp_path, capsys):
    model: Any = example().model(torch.float32)
    path = write_gguf(tmp_path / "model.gguf", model, fill)
    words: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ids = words(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        new = model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    expected = new.tolist()
    assert len(set(expected)) > 4
    main(["port", str(path), str(tmp_path / "ours")])
    main(["port", str(path), str(tmp_path / "theirs"), "--to", "huggingface"])
    for source in (path, tmp_path / "ours", tmp_path / "theirs"):
        (found,) = from_pretrained(source).generator()(TEXTS[:1], max_tokens=12)
        assert found.tokens == expected, source
    capsys.readouterr()
    main(["generate", str(path), "--prompt", TEXTS[0], "--max-tokens", "12"])
    assert capsys.readouterr().out == found.text + "\n"
    # And what `transformers` loads has all that it needs.
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values()), report
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again.generation_config, name) == SIZES[name]
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs.special_tokens_map == words.special_tokens_map
    for text in TEXTS:
        assert theirs(text).input_ids == words(text).input_ids


@pytest.mark.parametrize("fill", [byte_level, sentencepiece])
def test_tokens_are_those_of_transformers(fill, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", example().model(torch.float32), fill)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = PretrainedTokenizer(open_checkpoint(path).companions[0])
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ids[0] == 1
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_pairs_of_bytes_are_those_of_the_tokenizer_that_was_written(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", example().model(torch.float32))
    ours = PretrainedTokenizer(open_checkpoint(path).companions[0])
    for text in TEXTS:
        assert ours.encode(text) == tokenizer().encode(text)


def test_pieces_are_joined_best_score_first(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", example().model(torch.float32), sentencepiece)
    config = open_checkpoint(path).config
    pieces, scores = config["tokenizer.ggml.tokens"], config["tokenizer.ggml.scores"]
    score = dict(zip(pieces, scores, strict=True))
    ours = PretrainedTokenizer(open_checkpoint(path).companions[0])
    for text in TEXTS[:4]:
        symbols = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = ["".join(symbols[i : i + 2]) for i in range(len(symbols) - 1)]
            best = max((p for p in pairs if p in score), key=score.__getitem__, default=None)
            if best is None:
                break
            place = pairs.index(best)
            symbols[place : place + 2] = [best]
        known = [
            [symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            for symbol in symbols
        ]
        assert ours.encode(text)[1:] == [pieces.index(piece) for each in known for piece in each]


SCALINGS = {
    "none": ({"rope_type": "default"}, {}, 1e-10),
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"type": gguf.RopeScalingType.LINEAR, "factor": 4.0},
        1e-10,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"type": gguf.RopeScalingType.YARN, "factor": 4.0, "orig_ctx_len": 16, "finetuned": True},
        1e-10,
    ),
    "yarn, borders given": (
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 8.0, "beta_slow": 2.0,
        },
        {
            "type": gguf.RopeScalingType.YARN, "factor": 4.0, "orig_ctx_len": 16,
            "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0,
        },
        1e-10,
    ),
    "llama3, as published": (
        {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {},
        1e-10,
    ),
    # The file has the factors in float32 then: angles of up to 2 are off by 1e-7, logits by 7e-7.
    "llama3, of other settings": (
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
            "original_max_position_embeddings": 256,
        },
        {},
        3e-6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotations_are_those_of_the_model(name, tmp_path):
    rope, scaling, tolerance = SCALINGS[name]
    # With that base four pairs have waves of each kind.
    small = example(rope_parameters={"rope_theta": 1e6, **rope})
    model: Any = small.model()
    for parameter in model.parameters():
        parameter.data = parameter.data.float().double()  # what the file holds
    path = write_gguf(tmp_path / "model.gguf", model, **scaling)
    ids = tokens(VOCABULARY, 64)[:1]
    with float64(LlamaForCausalLM), torch.no_grad():
        expected = model(torch.from_numpy(ids).long()).logits.numpy()
    main(["port", str(path), str(tmp_path / "theirs"), "--to", "huggingface"])
    for source in (path, tmp_path / "theirs"):
        with jax.enable_x64(True):
            found = from_pretrained(source, dtype=jnp.float64)
            logits = np.asarray(jax.jit(lambda ids, f=found: f.model(ids))(jnp.asarray(ids)))
        assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max(), source


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.tokens": []}, "the file has none"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv': gpt2 and llama are"),
        ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre is 'chameleon': known are gpt-2"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
    ],
    ids=str,
)
def test_why_there_is_no_tokenizer_is_said(change, reason, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", example().model(torch.float32))
    config = {**open_checkpoint(path).config, **change}
    config = {name: value for name, value in config.items() if value is not None}
    found = gguf_tokenizer.problem(config)
    assert found is not None
    assert found.startswith(reason)
    assert gguf_tokenizer.companions(path, config) == ()
