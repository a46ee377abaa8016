"""Training a language model: what a run leaves, that it learns, that it goes on exactly."""

import dataclasses
import json
import math
import re
import shlex

import numpy as np
import pytest

from jax_transformer.cli import main
from jax_transformer.config import BOS_ID, DecoderOnlyConfig, GenerationConfig
from jax_transformer.data.characters import ByteTokenizer, CharacterTokenizer
from jax_transformer.data.documents import PARTS
from jax_transformer.data.tokens import open_tokens, tokenize, write_tokens
from jax_transformer.decoding.generate import TextGenerator
from jax_transformer.errors import InputError
from jax_transformer.training.config import load_config
from jax_transformer.training.language import LanguageEvaluator, split_texts
from jax_transformer.training.language_config import LanguageConfig
from jax_transformer.training.run import load_best
from jax_transformer.training.settings import load_settings
from jax_transformer.training.setup import prepare
from parity_tests import tiny
from parity_tests.training.test_loop import assert_same_run, lines


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A run for all tests that only read it, long enough to learn the alphabet."""
    settings = tiny.language_config(
        tmp_path_factory.mktemp("language"), steps=150, evaluate_every=75, log_every=50
    )
    return tiny.Finished(settings, tiny.train(settings))


def test_a_run_says_what_it_is_and_holds_all_that_is_needed(learnt):
    assert {path.name for path in learnt.path.iterdir()} == {
        "config.json", "tokenizer.json", "checkpoints", "metrics.jsonl", "tensorboard",
        "report.html",
    }  # fmt: skip
    saved = json.loads((learnt.path / "config.json").read_text())
    assert saved["task"] == "language"
    assert load_settings(LanguageConfig, learnt.path / "config.json") == learnt.settings
    samples = lines(learnt.settings, "eval")[-1]["samples"]
    report = (learnt.path / "report.html").read_text()
    assert "Sample text" in report
    assert "Bits per byte" in report
    assert samples[0]["continuation"] in report
    assert f"model      {samples[0]['continuation']}" in learnt.output


def test_the_model_learns_and_says_how_well(learnt):
    evaluations = lines(learnt.settings, "eval")
    # From ln 12 to knowing the next letter, but for the first one and the end.
    assert evaluations[-1]["loss"] < 0.25 * math.log(12)
    (test,) = lines(learnt.settings, "test")
    assert re.search(
        rf"Test loss {test['loss']:.3f} nats per token, {test['bits_per_byte']:.3f} bits per byte",
        learnt.output,
    )
    text = evaluations[-1]["samples"][0]
    written = text["prompt"] + text["continuation"]
    assert written in "abcdefgh" * 8


def test_the_best_model_comes_with_its_tokenizer_and_writes_on(learnt):
    model = load_best(learnt.path)
    assert isinstance(model.config, DecoderOnlyConfig)
    assert isinstance(model.tokenizer, CharacterTokenizer)
    rules = GenerationConfig(start_id=BOS_ID)
    generator = TextGenerator(
        model.graphdef, model.params, model.buffers, model.config, model.tokenizer, rules=rules
    )
    (completion,) = generator(["cde"], max_tokens=4)
    assert completion.text == "fgha"


def test_the_command_that_is_printed_names_the_run_and_a_prompt(learnt):
    program, command, directory, flag, prompt = shlex.split(learnt.output.strip().splitlines()[-1])
    assert (program, command, directory) == ("jax-transformer", "generate", str(learnt.path))
    assert flag == "--prompt"
    assert prompt


def test_rates_are_those_of_warmup_stable_decay(learnt):
    rates = {line["step"]: line["learning_rate"] for line in lines(learnt.settings, "train")}
    assert rates == pytest.approx({50: 0.02, 100: 0.02, 150: 0.002}, rel=1e-6)


def evaluator(model, documents, rows):
    return LanguageEvaluator(
        model.graphdef, model.buffers, model.config, model.tokenizer, documents,
        prompt="", sample_tokens=1, rows=rows, context=model.config.max_len,
    )  # fmt: skip


def test_the_held_out_loss_is_a_mean_over_tokens_whatever_the_batches(learnt):
    model = load_best(learnt.path)
    texts = [("abcdefgh" * 4)[:length] for length in range(1, 11)]
    documents = tokenize(texts, model.tokenizer)
    measured = [evaluator(model, documents, rows).measure(model.params) for rows in (1, 3, 16)]
    # float32 sums in another order.
    np.testing.assert_allclose(measured, np.broadcast_to(measured[0], (3, 2)), rtol=1e-6)
    single = [
        evaluator(model, tokenize([text], model.tokenizer), 1).measure(model.params)[0]
        for text in texts
    ]
    tokens = np.array([len(text) + 1 for text in texts])
    loss, bits = measured[0]
    assert loss == pytest.approx(np.average(single, weights=tokens), rel=1e-6)
    assert bits == pytest.approx(loss * tokens.sum() / (tokens - 1).sum() / math.log(2), rel=1e-6)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    settings = tiny.language_config(
        tmp_path_factory.mktemp("whole"), evaluate_every=7, checkpoint_every=5
    )
    tiny.train(settings)
    return settings


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, uninterrupted):
    settings = tiny.language_config(tmp_path, evaluate_every=7, checkpoint_every=5)
    with pytest.raises(InputError, match=rf"interrupted at step 6 of 10, .*: go on with python "
                       rf"train\.py lm --resume {settings.out}$"):  # fmt: skip
        tiny.train(settings, before_step=5, action=tiny.press_ctrl_c)
    tiny.train(tiny.resumed(settings))
    assert_same_run(settings, uninterrupted)


def test_stacked_layers_train_as_listed_ones(tmp_path):
    losses = {}
    for layout in ("listed", "stacked"):
        (tmp_path / layout).mkdir()
        settings = tiny.language_config(tmp_path / layout, layers=layout)
        deep = dataclasses.replace(settings.model, num_layers=2)
        settings = dataclasses.replace(settings, model=deep)
        with pytest.raises(InputError, match="interrupted at step 4"):
            tiny.train(settings, before_step=3, action=tiny.press_ctrl_c)
        losses[layout] = lines(settings, "train")[0]["loss"]
        setup = prepare(tiny.resumed(settings))
        names = tiny.named(setup.canonical(setup.state._asdict()))
        assert any("'layers'" in name and "[1]" in name for name in names)
    assert losses["stacked"] == pytest.approx(losses["listed"], rel=1e-5)


def test_a_file_of_tokens_trains_like_the_text_it_was_made_from(tmp_path, uninterrupted):
    texts = split_texts(uninterrupted.data, uninterrupted.seed)
    tokenizer = CharacterTokenizer.of(text for part in PARTS for text in texts[part])
    write_tokens(tmp_path / "text.bin", texts, tokenizer)
    settings = tiny.language_config(tmp_path, evaluate_every=7)
    data = dataclasses.replace(
        settings.data, text=(), separator="none", tokenizer="bpe", tokens=tmp_path / "text.bin"
    )
    settings = dataclasses.replace(settings, data=data)
    tiny.train(settings)
    for kind in ("train", "eval", "test"):
        assert lines(settings, kind) == lines(uninterrupted, kind)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "with seed=1: the run has 0 and keeps it"),
        ({"steps": 20}, "with steps=20: the wsd schedule of the run ends at step 10"),
        ({}, "all 10 steps are done"),
    ],
)
def test_a_resumed_run_keeps_its_settings(uninterrupted, changes, message):
    with pytest.raises(InputError, match=message):
        prepare(tiny.resumed(uninterrupted, **changes))


def test_a_run_is_resumed_by_the_command_of_its_task(uninterrupted):
    with pytest.raises(InputError, match=r"is language, not translation: go on with python train\."
                       r"py lm --resume"):  # fmt: skip
        load_config(uninterrupted.out / "config.json")
    with pytest.raises(InputError, match=r"is translation, not language: go on with python train\."
                       r"py --resume"):  # fmt: skip
        load_settings(LanguageConfig, tiny.finished().path / "config.json")


def test_a_resumed_run_keeps_its_text(tmp_path):
    settings = tiny.language_config(tmp_path, checkpoint_every=1)
    with pytest.raises(InputError, match="interrupted at step 1"):
        tiny.train(settings, before_step=0, action=tiny.press_ctrl_c)
    (path,) = settings.data.text
    path.write_text(path.read_text().replace("ab", "ba"))
    with pytest.raises(InputError, match="the training data are not those that the run was star"):
        prepare(tiny.resumed(settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "z"}, "the character 'z' does not occur"),
        ({"prompt": "a" * 15}, r"--prompt has more tokens than the 14 that leave room"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(tmp_path, changes, message):
    settings = tiny.language_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as refused:
        tiny.train(settings)
    assert "\n" not in str(refused.value)
    assert not settings.out.exists()


def test_bytes_can_be_counted_where_tokens_cannot(tmp_path):
    # Two bytes a character: half the nats per token, the same bits per byte.
    documents = tokenize(["éé"], ByteTokenizer())
    assert documents.num_bytes == 4
    assert tokenize(["éé"], CharacterTokenizer("é")).num_bytes == 4


def test_the_command_that_writes_tokens_makes_a_file_to_train_on(tmp_path, capsys, uninterrupted):
    (path,) = uninterrupted.data.text
    command = f"tokenize {tmp_path / 'a.bin'} --data.text {path} --data.separator blank-line"
    main([*command.split(), "--data.tokenizer", "chars"])
    assert f"train.py lm --data.tokens {tmp_path / 'a.bin'}" in capsys.readouterr().out
    texts = split_texts(uninterrupted.data, 0)
    file = open_tokens(tmp_path / "a.bin")
    for part in PARTS:
        expected = tokenize(texts[part], file.tokenizer)
        np.testing.assert_array_equal(file.parts[part].lengths, expected.lengths)
    for arguments in (command, f"tokenize {tmp_path / 'b.bin'} --data.tokens {tmp_path / 'a.bin'}"):
        with pytest.raises(SystemExit):
            main(arguments.split())
    refusals = capsys.readouterr().err.splitlines()
    assert "is there already" in refusals[0]
    assert "is a file of tokens already" in refusals[1]
