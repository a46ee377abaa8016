"""`jax-transformer generate` with a language model, as people call it."""

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jax_transformer.cli import main
from jax_transformer.config import OWN_RULES
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.decoding.sampling import make_strategy
from jax_transformer.training.run import load_best
from parity_tests import tiny

PROMPTS = ["abc", "", "fghab"]


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = tiny.language_config(
        tmp_path_factory.mktemp("language"), steps=30, evaluate_every=30, log_every=30
    )
    tiny.train(settings)
    return settings.out


@pytest.fixture(scope="module")
def generator(run):
    model = load_best(run)
    return TextGenerator(
        model.graphdef,
        model.params,
        model.buffers,
        model.config,
        model.tokenizer,
        rules=OWN_RULES,
    )


@pytest.fixture
def command(capsys):
    """What the command prints."""

    def call(*arguments: Any) -> str:
        main(["generate", *map(str, arguments)])
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return call


@pytest.fixture
def refused(tmp_path, capsys):
    """The line with which the command is refused; nothing is written."""

    def call(*arguments: Any) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main(["generate", *map(str, arguments)])
        assert ended.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.fullmatch(r"error: [^\n]+\n", printed.err)
        return printed.err.removeprefix("error: ").strip()

    return call


def test_a_prompt_is_continued_greedily_by_default(run, generator, command):
    (expected,) = generator(["abc"])
    assert command(run, "--prompt", "abc") == expected.text + "\n"
    assert command(run, "--prompt", "abc", "--max-tokens", 2) == (
        generator(["abc"], max_tokens=2)[0].text + "\n"
    )


def test_text_is_written_as_it_comes(run, monkeypatch):
    written = []

    class Terminal:
        def write(self, text):
            written.extend([text] * bool(text))

        def flush(self):
            written.append(None)

    monkeypatch.setattr(sys, "stdout", Terminal())
    main(["generate", str(run), "--prompt", "abc", "--seed", "1", "--max-tokens", "6"])
    texts = [text for text in written if text]
    assert len(texts) > 4
    assert all(after is None for text, after in itertools.pairwise(written) if text)


def test_flags_are_those_of_the_strategy(run, generator, command):
    strategy = make_strategy(
        temperature=1.5, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3
    )
    (expected,) = generator(["abc"], max_tokens=9, strategy=strategy, stops=["zz", "y"])
    flags = (
        "--temperature", 1.5, "--top-k", 9, "--top-p", 0.95, "--min-p", 0.01,
        "--repetition-penalty", 1.1, "--seed", 3, "--max-tokens", 9, "--stop", "zz", "--stop", "y",
    )  # fmt: skip
    assert command(run, "--prompt", "abc", *flags) == expected.text + "\n"
    (plain,) = generator(["abc"], max_tokens=9)
    assert plain.text != expected.text


def test_a_stop_string_cuts_the_text(run, generator, command):
    (whole,) = generator(["abc"], max_tokens=8)
    stop = whole.text[2:4]
    found = command(run, "--prompt", "abc", "--stop", "no", "--stop", stop)
    assert found == whole.text[: whole.text.index(stop)] + "\n"


def test_line_n_of_the_output_continues_line_n_of_the_input(run, generator, command, tmp_path):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    assert command(run, "--input", prompts, "--output", output, "--seed", 2) == ""
    expected = generator(PROMPTS, strategy=make_strategy(seed=2))
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"prompt": prompt, "text": found.text}
        for prompt, found in zip(PROMPTS, expected, strict=True)
    ]
    assert command(run, "--input", prompts, "--seed", 2) == output.read_text(encoding="utf-8")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.jsonl", "prompts.txt"]


def test_what_it_cannot_continue_is_refused(run, tmp_path, refused):
    prompt = ("--prompt", "abc")
    assert refused(run, "--text", "a") == f"--text: {run} holds a language model, give --prompt"
    assert refused(run, *prompt, "--max-len", 3).endswith("language model, give --max-tokens")
    assert refused(run) == "give either --prompt with text or --input with a file of them"
    assert refused(run, *prompt, "--input", Path(__file__)).startswith("give either --prompt")
    assert refused(run, *prompt, "--output", __file__).endswith(
        "there already: choose another name"
    )
    assert refused(run, *prompt, "--temperature", 0).startswith("temperature=0: logits cannot be")
    assert refused(run, *prompt, "--top-p", 2).startswith("top_p=2.0: must be above 0")
    assert refused(run, *prompt, "--stop", "").startswith("a stop string is empty")
    assert "more than the 16 of the model" in refused(run, *prompt, "--max-tokens", 13)
    assert "shorten it" in refused(run, "--prompt", "abcdefgh" * 2)
    assert "no such file" in refused(run, "--input", tmp_path / "none.txt")
    assert refused(tmp_path, *prompt).endswith(f"{tmp_path} is not a run directory of train.py")


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (("--prompt", "a"), "give --text"),
        (("--max-tokens", 3), "give --max-len"),
        (("--temperature", 1.0), "leave it out"),
        (("--top-k", 1), "leave it out"),
        (("--top-p", 1.0), "leave it out"),
        (("--min-p", 0.0), "leave it out"),
        (("--repetition-penalty", 1.0), "leave it out"),
        (("--stop", "a"), "leave it out"),
        (("--seed", 0), "leave it out"),
    ],
)
def test_a_translator_refuses_the_flags_of_a_language_model(flags, remedy, refused):
    translator = tiny.finished().path
    assert refused(translator, "--text", "a b", *flags) == (
        f"{flags[0]}: {translator} holds a translator, {remedy}"
    )
