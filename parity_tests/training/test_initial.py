"""`train.py --init-from`: a model that was made elsewhere, trained further and ported back."""

import copy
import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jax_transformer.cli import main
from jax_transformer.errors import InputError
from jax_transformer.porting.pretrained import from_pretrained
from jax_transformer.training.config import parse
from jax_transformer.training.initial import before
from jax_transformer.training.language_config import LanguageArchitecture
from jax_transformer.training.metrics import read_metrics
from jax_transformer.training.run import load_best
from jax_transformer.training.settings import OptimizerConfig
from jax_transformer.training.setup import prepare
from parity_tests import tiny
from parity_tests.porting import checkpoints, test_text
from parity_tests.porting.families import test_bart, test_bert, test_marian, test_t5
from parity_tests.porting.test_generation import words

TRANSLATING = {
    "bart": (test_bart.EXAMPLES[0], 2),
    "t5": (test_t5.EXAMPLES[0], 1),
    "marian": (test_marian.EXAMPLES[0], 7),
}
"""Models, and the token that ends a text."""

CONTINUING = {"llama": checkpoints.LLAMA, "gpt2": checkpoints.GPT2}

OPTIMIZER = OptimizerConfig(
    schedule="wsd", learning_rate=2e-3, warmup_steps=1, label_smoothing=0.0, average_decay=0.0
)


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of `transformers` of each model, with its tokenizer."""
    path = tmp_path_factory.mktemp("theirs")
    for name, example in CONTINUING.items():
        checkpoints.save(example, path / name)
    # GPT-2's own tokenizer puts nothing before a text.
    tokenizer = json.loads((path / "gpt2" / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (path / "gpt2" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, (example, end) in TRANSLATING.items():
        model: Any = example.model(torch.float32)
        model.config = copy.deepcopy(model.config)
        if name == "t5":  # as its files have it
            start = model.config.pad_token_id
            model.config.decoder_start_token_id = start
            model.generation_config.decoder_start_token_id = start
        model.save_pretrained(path / name)
        words(31, end).save(str(path / name / "tokenizer.json"))
    return path


def settings_for(name: str, folders: Path, directory: Path, **changes: Any) -> Any:
    """Settings of a run in `directory/run` that begins with that model."""
    directory.mkdir(exist_ok=True)
    if name in TRANSLATING:
        settings: Any = tiny.config(directory)
        settings = dataclasses.replace(
            settings, data=dataclasses.replace(settings.data, tsv=write_words(directory))
        )
    else:
        settings = tiny.language_config(directory, model=LanguageArchitecture(context=48))
    common = {"tokens_per_batch": 256, "optimizer": OPTIMIZER, "init_from": folders / name}
    return dataclasses.replace(settings, **common | changes)


def write_words(directory: Path) -> Path:
    """Pairs of words that the tokenizer has, the second half the first one backwards."""
    generator, path = random.Random(0), directory / "words.tsv"
    rows = {
        tuple(f"w{generator.randrange(8, 28)}" for _ in range(generator.randint(2, 8)))
        for _ in range(120)
    }
    lines = (f"{' '.join(row)}\t{' '.join(row[::-1])}\n" for row in sorted(rows))
    path.write_text("".join(lines))
    return path


def their_loss(model: Any, setup: Any) -> float:
    """Nats per token of the validation text by `transformers`, one text at a time."""
    total = count = 0.0
    for inputs, labels in their_batches(model, setup.task):
        with torch.no_grad():
            loss = model(**inputs, labels=labels).loss
        # A decoder is given its own text and shifts it.
        tokens = labels.shape[1] - (not model.config.is_encoder_decoder)
        total, count = total + float(loss) * tokens, count + tokens
    return total / count


def their_batches(model: Any, task: Any):
    """The arguments of the model, text by text."""
    encode = task.tokenizer.backend.encode
    if model.config.is_encoder_decoder:
        text = task.corpus.valid
        for source, target in zip(text.sources, text.targets, strict=True):
            ids = torch.tensor([encode(source).ids])
            yield {"input_ids": ids}, torch.tensor([encode(target).ids])
        return
    start, end = {"llama": (1, 2), "gpt2": (1, 2)}[model.config.model_type]
    documents = task.parts["valid"]
    for index in range(len(documents)):
        ids = documents.slice(index, 0, 10**6).tolist()
        tokens = torch.tensor([[start, *ids, end]])
        yield {"input_ids": tokens}, tokens


@pytest.mark.parametrize("name", [*CONTINUING, *TRANSLATING])
def test_before_the_first_step_the_loss_is_that_of_transformers(name, folders, tmp_path):
    settings = settings_for(name, folders, tmp_path)
    setup = prepare(settings)
    if name == "llama":
        stacked = prepare(dataclasses.replace(settings, layers="stacked"))
        assert not stacked.state.params.keys() ^ setup.state.params.keys()
        again = stacked.canonical(stacked.state.params)
        jax.tree.map(np.testing.assert_array_equal, again, setup.state.params)
    example = CONTINUING[name] if name in CONTINUING else TRANSLATING[name][0]
    build: Any = example.build
    model = build.from_pretrained(folders / name).eval()
    measure: Any = getattr(setup.valid_evaluator, "loss", None)
    params = setup.canonical(setup.state.params)
    found = measure(params) if measure is not None else setup.valid_evaluator.measure(params)[0]
    # Float32: logits of order 10, means of some hundred tokens in another order.
    assert found == pytest.approx(their_loss(model, setup), rel=3e-6)


@pytest.fixture(scope="module", params=["llama", "bart"])
def trained(request, folders, tmp_path_factory):
    """A few updates, and the run ported back."""
    directory = tmp_path_factory.mktemp(request.param)
    settings = settings_for(
        request.param, folders, directory, steps=12, evaluate_every=4, checkpoint_every=4
    )
    output = tiny.train(settings)
    main(["port", str(settings.out), str(directory / "back")])
    return request.param, settings, directory / "back", output


def test_a_few_updates_lower_the_loss(trained, folders, tmp_path):
    name, settings, _, _ = trained
    first = settings_for(name, folders, tmp_path)
    evaluation = prepare(dataclasses.replace(first, data=settings.data))
    before_training = evaluation.valid_evaluator(evaluation.canonical(evaluation.state.params)).loss
    losses = [line["loss"] for line in read_metrics(settings.out) if line["kind"] == "eval"]
    assert losses[-1] < losses[0] < before_training
    assert losses[-1] < 0.9 * before_training


def test_what_is_ported_back_is_loaded_by_transformers_and_has_the_loss_of_the_run(
    trained, folders, tmp_path
):
    name, settings, back, _ = trained
    example = CONTINUING[name] if name in CONTINUING else TRANSLATING[name][0]
    build: Any = example.build
    model, report = build.from_pretrained(back, output_loading_info=True)
    assert not any(report.values()), report
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (back / file).read_bytes() == (folders / name / file).read_bytes(), file
    setup = prepare(dataclasses.replace(settings, out=tmp_path / "other"))
    best = max(
        (line for line in read_metrics(settings.out) if line["kind"] == "eval"),
        key=lambda line: (line.get("bleu", -line["loss"]), line["step"]),
    )
    assert their_loss(model.eval(), setup) == pytest.approx(best["loss"], rel=3e-6)


def test_the_run_generates_by_the_rules_of_its_model(trained, folders, capsys):
    name, settings, back, _ = trained
    flag, given = ("--prompt", "abc") if name in CONTINUING else ("--text", "w9 w12 w20")
    limit = "--max-tokens" if name in CONTINUING else "--max-len"
    texts = []
    for path in (settings.out, back):
        capsys.readouterr()
        main(["generate", str(path), flag, given, limit, "6"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    found, theirs = from_pretrained(settings.out), from_pretrained(folders / name)
    assert found.rules == theirs.rules
    assert load_best(settings.out).tokenizer.encode(given) == theirs.tokenizer.encode(given)


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_the_run_moves_to_pytorch_with_its_optimizer_and_back(trained, tmp_path):
    _, settings, _, _ = trained
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(settings.out / "tokenizer.json", folder)
    shutil.copy(settings.out / "config.json", folder)
    main(["port", str(settings.out), str(folder / "a.pt"), "--with-optimizer"])
    main(["port", str(folder / "a.pt"), str(tmp_path / "run"), "--with-optimizer"])
    found, expected = (tiny.saved(path, "latest")[1] for path in (tmp_path / "run", settings.out))
    assert found.keys() == expected.keys()
    moments = [key for key in expected if "window" not in key and "gradient_norm" not in key]
    tiny.assert_same_bits(
        {key: found[key] for key in moments}, {key: expected[key] for key in moments}
    )


@pytest.mark.parametrize("trained", ["llama"], indirect=True)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(trained, tmp_path):
    _, settings, _, _ = trained
    stopped = dataclasses.replace(settings, out=tmp_path / "run")
    with pytest.raises(InputError, match="interrupted at step 5"):
        tiny.train(stopped, before_step=4, action=tiny.press_ctrl_c)
    tiny.train(dataclasses.replace(stopped, resume=stopped.out))
    for kind in ("latest", "best"):
        tiny.assert_same_bits(tiny.saved(stopped.out, kind)[1], tiny.saved(settings.out, kind)[1])


def test_a_run_is_trained_further_from_its_best_model(tmp_path):
    finished = tiny.finished()
    settings: Any = dataclasses.replace(
        finished.settings, out=tmp_path / "run", init_from=finished.path
    )
    setup = prepare(settings)
    best = load_best(finished.path)
    found = setup.canonical(setup.state.params)
    jax.tree.map(np.testing.assert_array_equal, found, best.params)
    assert setup.saved_config().keys() == {"task", "training", "model", "data"}
    assert setup.task.model_config == best.config


def test_with_its_optimizer_a_model_is_trained_as_its_run_would_go_on(tmp_path):
    settings = tiny.language_config(tmp_path)
    with pytest.raises(InputError, match="interrupted at step 4"):
        tiny.train(settings, before_step=3, action=tiny.press_ctrl_c)
    begun = dataclasses.replace(
        settings, out=tmp_path / "new", init_from=settings.out, init_optimizer=True
    )
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    tiny.train(begun)
    tiny.train(dataclasses.replace(settings, resume=tmp_path / "resumed"))
    # The sums since the last line of the metrics alone stay behind: there was one at step 4.
    tiny.assert_same_bits(
        tiny.saved(tmp_path / "new", "latest")[1], tiny.saved(tmp_path / "resumed", "latest")[1]
    )
    other = dataclasses.replace(settings.optimizer, eps=1e-8)
    with pytest.raises(InputError, match=r"has eps=1e-09, this run 1e-08: give --optimizer\.eps"):
        prepare(dataclasses.replace(begun, out=tmp_path / "x", optimizer=other))
    with pytest.raises(InputError, match="has had 4 updates already, but steps=3"):
        prepare(dataclasses.replace(begun, out=tmp_path / "x", steps=3))


def test_a_translator_with_vocabularies_of_its_own_keeps_their_files(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    test_text.save(folder, own=True)
    sizes = [
        len(json.loads((folder / f"{name}vocab.json").read_text())) for name in ("", "target_")
    ]
    example = test_marian.example(
        "small",
        vocab_size=sizes[0],
        decoder_vocab_size=sizes[1],
        share_encoder_decoder_embeddings=False,
        pad_token_id=sizes[1] - 1,
        decoder_start_token_id=sizes[1] - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_position_embeddings=64,
    )
    model: Any = example.model(torch.float32)
    model.save_pretrained(folder)
    pairs = zip(test_text.SOURCE * 8, test_text.TARGET * 8, strict=True)
    lines = (f"{source} {i}\t{target} {i}\n" for i, (source, target) in enumerate(pairs))
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    settings = tiny.config(tmp_path, init_from=folder, optimizer=OPTIMIZER)
    data = dataclasses.replace(settings.data, tsv=tmp_path / "pairs.tsv", valid_size=3, test_size=3)
    setup = prepare(dataclasses.replace(settings, data=data))
    words = test_text.theirs(folder, True)
    text = setup.task.corpus.valid
    total = count = 0.0
    for source, target in zip(text.sources, text.targets, strict=True):
        inputs = words(source, text_target=target, return_tensors="pt")
        with torch.no_grad():
            total += float(model(**inputs).loss) * inputs["labels"].shape[1]
        count += inputs["labels"].shape[1]
    found = setup.valid_evaluator.loss(setup.canonical(setup.state.params))
    assert found == pytest.approx(total / count, rel=3e-6)
    setup.run.create(setup.saved_config(), setup.task.tokenizer, setup.brought[1])
    for name in ("source.spm", "target.spm", "vocab.json", "target_vocab.json"):
        assert (setup.run.path / name).read_bytes() == (folder / name).read_bytes()
    again = setup.run.load_tokenizer(setup.run.load_model_config())
    assert again.encode("the cat") == setup.task.tokenizer.encode("the cat")


def test_documents_begin_as_the_tokenizer_begins_texts_or_else_with_an_end(folders):
    found = {name: from_pretrained(folders / name).tokenizer for name in CONTINUING}
    assert {name: before(tokenizer) for name, tokenizer in found.items()} == {
        "llama": [1],
        "gpt2": [],
    }


def test_text_with_tokens_that_the_model_has_no_row_for_is_refused(folders, tmp_path):
    shutil.copytree(folders / "gpt2", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": i, "content": f"<picture {i}>", "special": True} | plain
        for i in range(len(tokenizer["model"]["vocab"]), 301)
    ]
    path.write_text(json.dumps(tokenizer))
    settings = settings_for("gpt2", tmp_path, tmp_path / "data", init_from=tmp_path / "model")
    assert prepare(settings).task.tokenizer.vocab_size == 301
    (text,) = settings.data.text
    text.write_text(f"{text.read_text()}\n\na <picture 300>")
    with pytest.raises(InputError, match="has the token 300, but the model has 300 of them"):
        prepare(settings)


def test_what_cannot_be_trained_is_refused(folders, tmp_path):
    example = test_bert.EXAMPLES[0]
    model: Any = example.model(torch.float32)
    model.save_pretrained(tmp_path / "bert")
    shutil.copytree(folders / "llama", tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").unlink()
    cases = {
        "bert is an encoder, which neither": ("llama", {"init_from": tmp_path / "bert"}),
        r"bart is an encoder-decoder: train it with python train\.py --init-from": (
            "llama", {"init_from": folders / "bart"},
        ),
        r"llama is a language model: train it with python train\.py lm --init-from": (
            "bart", {"init_from": folders / "llama"},
        ),
        r"it has no tokenizer\.json: copy": ("llama", {"init_from": tmp_path / "llama"}),
        r"reads at most 64 tokens: give --model\.context 64": (
            "llama", {"model": LanguageArchitecture(context=65)},
        ),
        "holds no optimizer": ("llama", {"init_optimizer": True}),
    }  # fmt: skip
    for line, (name, changes) in cases.items():
        settings = settings_for(name, folders, tmp_path / "data", **changes)
        with pytest.raises(InputError, match=line):
            prepare(settings)
        assert not settings.out.exists()


@pytest.mark.parametrize(
    "flags",
    [
        "lm --init-from x --model.d-model 8",
        "lm --model.tied=False --init-from=x",
        "lm --init-from x --data.vocab-size 300",
        "lm --init-from x --data.tokenizer bytes",
        "--init-from x --model.max_len 9",
    ],
)
def test_flags_of_a_new_model_are_refused(flags):
    with pytest.raises(InputError, match="with --init-from: architecture and tokenizer are those"):
        parse(flags.split())
    kept = parse(["lm", "--init-from", "x", "--model.context", "32", "--data.field", "body"])
    assert kept.model.context == 32
