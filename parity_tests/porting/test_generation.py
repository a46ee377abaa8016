"""Ported models write what `transformers` writes, and what is ported back does so again."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from transformers import GenerationConfig

from jax_transformer.cli import main
from jax_transformer.porting.pretrained import from_pretrained
from parity_tests import tiny
from parity_tests.porting.families import (
    test_bart,
    test_bert,
    test_bloom,
    test_gemma,
    test_gemma2,
    test_gemma3,
    test_gpt2,
    test_gpt_neox,
    test_gptj,
    test_llama,
    test_marian,
    test_mistral,
    test_mpt,
    test_olmo2,
    test_phi3,
    test_qwen2,
    test_qwen3,
    test_t5,
)
from parity_tests.porting.families.harness import Example

# Windows of three tokens, rotations of every kind, heads of their own: see these files. The number
# is what matrices are multiplied by, lest a model with tied tables repeats what it reads.
CONTINUING = {
    "llama": (test_llama.EXAMPLES[2], 1),
    "mistral": (test_mistral.EXAMPLES[0], 1),
    "qwen2": (test_qwen2.EXAMPLES[1], 1),
    "qwen3": (test_qwen3.EXAMPLES[1], 2),
    "gemma": (test_gemma.EXAMPLES[0], 2),
    "gemma2": (test_gemma2.EXAMPLES[1], 2),
    "gemma3": (test_gemma3.EXAMPLES[1], 2),
    "phi3": (test_phi3.EXAMPLES[1], 1),
    "olmo2": (test_olmo2.EXAMPLES[1], 3),
    "gpt2": (test_gpt2.EXAMPLES[0], 3),
    "gptj": (test_gptj.EXAMPLES[0], 2),
    "gpt_neox": (test_gpt_neox.EXAMPLES[1], 3),
    "bloom": (test_bloom.EXAMPLES[0], 3),
    "mpt": (test_mpt.EXAMPLES[0], 3),
}
TRANSLATING = {
    "t5": (test_t5.EXAMPLES[0], 3),
    "t5 1.1": (test_t5.EXAMPLES[1], 1),
    "bart": (test_bart.EXAMPLES[0], 2),
    "marian": (test_marian.EXAMPLES[0], 3),
}

PROMPTS = ([3, 17, 5, 29, 11, 8, 23, 2, 14, 27, 6], [9, 4], [12, 25, 7, 18, 10, 22, 5])
"""Ids of a vocabulary of 31, of different numbers."""

NEW = 12
"""Tokens that are generated: all windows have gone by then."""


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


def louder(example: Example, factor: int) -> Any:
    """The model, its matrices but for tables multiplied."""
    model = example.model(torch.float32)
    tables = ("embed", "wte", "wpe", "shared")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(table in name for table in tables):
                parameter.mul_(factor)
    return model


def words(size: int, end: int | None = None) -> tokenizers.Tokenizer:
    """A word for each id: `w3 w5`; with the word `end` after each text."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if end is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A w{end}", special_tokens=[(f"w{end}", end)]
        )
    return backend


def text(ids) -> str:
    return " ".join(f"w{number}" for number in ids)


def batch(rows, *, left: bool) -> dict[str, torch.Tensor]:
    """Rows of one length, padded on one side."""
    width = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), width), np.int64)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), None) if left else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def generated(model: Any, rows, **options: Any) -> list[list[int]]:
    """What `transformers` generates greedily, of which no token is nearly chosen; without what
    comes before."""
    inputs = batch(rows, left=not model.config.is_encoder_decoder)
    with torch.no_grad():
        found = model.generate(
            **inputs,
            **options,
            do_sample=False,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
    new = found.sequences[:, -len(found.scores) :].tolist()
    for step, scores in enumerate(found.scores):
        best = torch.nan_to_num(scores, neginf=-1e9).topk(2).values
        margins = best[:, 0] - best[:, 1]
        ended = [set(row[:step]) & set(ids_of(model, "eos_token_id")) for row in new]
        assert min(m for m, over in zip(margins, ended, strict=True) if not over) > 1e-3
    return [until(row, ids_of(model, "eos_token_id")) for row in new]


def ids_of(model: Any, name: str) -> list[int]:
    """A field of the generation config, as a list."""
    value = getattr(model.generation_config, name)
    return [] if value is None else [value] if isinstance(value, int) else value


def until(row: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first end, with it."""
    places = [place for place, token in enumerate(row) if token in ends]
    return row[: places[0] + 1] if places else row


def saved(model: Any, path: Path, backend: tokenizers.Tokenizer) -> Path:
    """A folder as `transformers` and a tokenizer make it."""
    model.save_pretrained(path)
    backend.save(str(path / "tokenizer.json"))
    return path


def ported(theirs: Path) -> tuple[Path, Path]:
    """The port of a folder, and the folder that comes back."""
    ours, back = theirs.with_name("ours"), theirs.with_name("back")
    main(["port", str(theirs), str(ours)])
    main(["port", str(ours), str(back)])
    return ours, back


def loaded(example: Example, path: Path) -> Any:
    """The model of a folder, which has all that it needs and no more."""
    build: Any = example.build
    model, report = build.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("name", CONTINUING)
def test_prompts_are_continued_as_by_transformers(name, tmp_path):
    example, factor = CONTINUING[name]
    model = louder(example, factor)
    model.generation_config = GenerationConfig(pad_token_id=0)
    free = generated(model, PROMPTS, max_new_tokens=NEW)
    assert len({*itertools.chain(*free)}) > 5, "the model says the same all the time"
    # Two tokens end a text: one that the first row comes to, and one that none does.
    unused = next(token for token in range(31) if token not in itertools.chain(*free))
    model.generation_config.eos_token_id = [unused, free[0][5]]
    theirs = saved(model, tmp_path / "theirs", words(example.config.vocab_size))
    expected = generated(loaded(example, theirs), PROMPTS, max_new_tokens=NEW)
    assert expected[0] == until(free[0], [free[0][5]])

    ours, back = ported(theirs)
    found = from_pretrained(ours).generator()([*map(text, PROMPTS)], max_tokens=NEW)
    assert [each.tokens for each in found] == expected
    assert generated(loaded(example, back), PROMPTS, max_new_tokens=NEW) == expected


RULES = {
    "t5": {"decoder_start_token_id": 0, "max_new_tokens": NEW},
    "t5 1.1": {"decoder_start_token_id": 0, "max_length": NEW + 1, "repetition_penalty": 1.5},
    "bart": {
        "decoder_start_token_id": 2, "bos_token_id": 1, "forced_bos_token_id": 1, "min_length": 8,
        "forced_eos_token_id": 2, "max_length": NEW + 1, "no_repeat_ngram_size": 2,
    },
    "marian": {
        "decoder_start_token_id": 35, "pad_token_id": 35, "bad_words_ids": [[35]],
        "forced_eos_token_id": 7, "max_length": NEW + 1, "suppress_tokens": [16],
        "begin_suppress_tokens": [22],
    },
}  # fmt: skip
"""What the published models say, and what is harder to keep."""
EOS = {"t5": 1, "t5 1.1": 1, "bart": 2, "marian": 7}


@pytest.mark.parametrize("name", TRANSLATING)
def test_sentences_are_translated_as_by_transformers(name, tmp_path, capsys):
    example, factor = TRANSLATING[name]
    model = louder(example, factor)
    model.generation_config = GenerationConfig(**{"pad_token_id": 0} | RULES[name])
    end = EOS[name]
    sources = [[*row, end] for row in PROMPTS]
    free = generated(model, sources)
    assert len({*itertools.chain(*free)}) > 5, "the model says the same all the time"
    model.generation_config.eos_token_id = [end, free[1][4]]
    theirs = saved(model, tmp_path / "theirs", words(example.config.vocab_size, end))
    expected = generated(loaded(example, theirs), sources)
    lines = [text([token for token in row if token not in (end, free[1][4])]) for row in expected]

    ours, back = ported(theirs)
    found = from_pretrained(ours)
    assert found.translator()(found.params, [*map(text, PROMPTS)]) == lines
    assert generated(loaded(example, back), sources) == expected
    if name == "t5":
        capsys.readouterr()
        main(["generate", str(ours), "--text", text(PROMPTS[1])])
        assert capsys.readouterr().out == lines[1] + "\n"


def folder(path: Path, family: str, *, config: Any = (), generation: Any = None) -> Path:
    """A small model whose files say that of generating."""
    example = (CONTINUING | TRANSLATING)[family][0]
    model: Any = example.model(torch.float32)
    saved(model, path, words(example.config.vocab_size, 1))
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | dict(config)))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_config_counts_where_there_is_no_file_about_generating(tmp_path):
    said = {"decoder_start_token_id": 3, "eos_token_id": 9, "forced_eos_token_id": 9}
    theirs = folder(tmp_path / "theirs", "bart", config=said)
    rules = from_pretrained(theirs).rules
    assert (rules.start_id, rules.end_ids, rules.last_id) == (3, (9,), 9)
    # By way of a file that has its config in the manifest beside it, and of our directory.
    steps = ("a.safetensors", "ours", "back")
    for step, before in zip(steps, ("theirs", *steps), strict=False):
        main(["port", str(tmp_path / before), str(tmp_path / step)])
        assert from_pretrained(tmp_path / step).rules == rules, step
    kept = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert kept.items() >= said.items()
    # The file counts where there is one, for all of it.
    (tmp_path / "ours" / "generation_config.json").write_text('{"decoder_start_token_id": 4}')
    changed = from_pretrained(tmp_path / "ours").rules
    assert (changed.start_id, changed.end_ids) == (4, ())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "there is no decoder_start_token_id: add what a decoder begins with"),
        ({"decoder_start_token_id": 31}, "start_id=31: the model has the tokens 0 to 30"),
        ({"bos_token_id": 1, "eos_token_id": "a"}, r"end_ids=('a',): must be whole, at least 0"),
        ({"bad_words_ids": [[3, 4]]}, "bad_words_ids has [3, 4]: only single tokens are built"),
        ({"sequence_bias": [[[3], 1.0]]}, "sequence_bias=[[[3], 1.0]] is not built here"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size=2 is not built here"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_when_it_is_to_be_followed(
    said, message, tmp_path, capsys
):
    theirs = folder(tmp_path / "theirs", "bart", generation=said)
    main(["port", str(theirs), str(tmp_path / "ours")])  # Weights move all the same.
    capsys.readouterr()
    for path in (theirs, tmp_path / "ours"):
        with pytest.raises(SystemExit):
            main(["generate", str(path), "--text", "w3"])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}: ")
        assert message in line


def test_the_kind_of_model_says_which_flag_is_meant(tmp_path, capsys):
    language = folder(tmp_path / "llama", "llama", generation={"min_length": 3})
    translation = folder(tmp_path / "t5", "t5", generation={"decoder_start_token_id": 0})
    encoder = tmp_path / "bert"
    test_bert.HEAD.model(torch.float32).save_pretrained(encoder)
    for arguments, message in (
        ((language, "--text", "w3"), "--text: .* holds a language model, give --prompt"),
        ((translation, "--prompt", "w3"), "--prompt: .* holds a translator, give --text"),
        ((translation, "--text", "w3", "--max-len", "0"), "max_len=0: must be at least 1"),
        ((encoder, "--prompt", "w3"), ".* holds an encoder, which writes no text: .*"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["generate", *map(str, arguments)])
        assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)
