import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from jax_transformer.arguments import flags
from jax_transformer.cli import Generate, main
from jax_transformer.config import ModelConfig, from_dict
from jax_transformer.errors import InputError
from jax_transformer.training.config import PRESETS, TrainConfig, load_config, parse
from jax_transformer.training.language_config import LANGUAGE_PRESETS, LanguageConfig
from jax_transformer.training.settings import leaves, to_json
from jax_transformer.training.setup import make_schedule, stacks
from jax_transformer.training.tokenize import Tokenize


def with_change(values, name, value):
    """A copy of nested dicts with one leaf set, or removed where `value` is `...`."""
    values = json.loads(json.dumps(values))
    *groups, last = name.split(".")
    group = values
    for key in groups:
        group = group[key]
    if value is ...:
        del group[last]
    else:
        group[last] = value
    return values


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_asked_for_and_read_back(name):
    config = parse(["--preset", name])
    assert config == PRESETS[name]
    assert config.preset == name
    values = json.loads(json.dumps(to_json(config)))
    assert from_dict(TrainConfig, values, place="here") == config


def test_the_original_preset_is_the_base_model_of_the_paper():
    # Vaswani et al. 2017: table 3, sections 5.3 and 5.4.
    config = PRESETS["original"]
    model, optimizer = config.model, config.optimizer
    assert (model.d_model, model.num_heads, model.d_ff) == (512, 8, 2048)
    assert (model.num_encoder_layers, model.num_decoder_layers) == (6, 6)
    assert (model.norm_placement, model.activation, model.dropout) == ("post", "relu", 0.1)
    assert (optimizer.b1, optimizer.b2, optimizer.eps) == (0.9, 0.98, 1e-9)
    assert (optimizer.warmup_steps, optimizer.label_smoothing) == (4000, 0.1)
    assert optimizer.schedule == "noam"
    assert optimizer.learning_rate_scale == 1.0


def test_the_layers_are_stacked_where_that_is_asked_for_or_they_are_many():
    base = ModelConfig(src_vocab_size=8, tgt_vocab_size=8)
    deep = dataclasses.replace(base, num_decoder_layers=24)
    assert [stacks(layout, base) for layout in ("auto", "listed", "stacked")] == [
        False, False, True,
    ]  # fmt: skip
    assert [stacks(layout, deep) for layout in ("auto", "listed")] == [True, False]


def test_flags_set_what_they_name_and_nothing_else():
    flags = (
        "--preset tiny --steps 7 --seed=3 --out x --data.source a.txt --data.target b.txt.gz "
        "--model.dropout 0 --optimizer.warmup_steps 9"
    )
    config = parse(flags.split())
    changed = dict(leaves(to_json(config)))
    default = dict(leaves(to_json(PRESETS["tiny"])))
    assert {name: value for name, value in changed.items() if value != default[name]} == {
        "steps": 7, "seed": 3, "out": "x", "data.source": "a.txt", "data.target": "b.txt.gz",
        "model.dropout": 0.0, "optimizer.warmup_steps": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stepz 3", r"unknown flag --stepz: did you mean --steps or --seed\?"),
        ("--warmup-steps 3", r"--warmup-steps: did you mean --optimizer\.warmup-steps\?"),
        ("--zzzzz", r"unknown flag --zzzzz: train\.py --help lists all flags"),
        ("corpus.txt", r"unexpected argument 'corpus\.txt': settings are flags"),
        ("--steps many", r"--steps: 'many' is not a whole number; train\.py --help"),
        ("--steps", r"Missing value for argument '--steps'"),
        ("--steps 0", r"steps=0: must be a whole number of at least 1"),
        ("--seed -1", r"seed=-1: must be from 0 to 4294967295"),
        ("--seed 4294967296", r"seed=4294967296: must be from 0 to 4294967295"),
        ("--preset big", r"--preset=big: must be one of small, tiny, original, original-big"),
        ("--preset", r"Missing value for argument '--preset'"),
        ("--layers some", r"invalid choice 'some' .*--layers"),
        ("--model.num-heads 7", r"d_model=\d+ is not divisible by num_heads=7: choose a width"),
        ("--model.dropout 1", r"dropout=1\.0: must be at least 0 and below 1"),
        ("--optimizer.b2 nan", r"b2=nan: must be at least 0 and below 1"),
        ("--optimizer.learning-rate-scale inf", r"learning_rate_scale=inf: must be above 0 and fi"),
        ("--optimizer.max-norm 0", r"max_norm=0\.0: must be above 0 \(inf clips nothing\)"),
        ("--data.source a", r"--data\.source=a without --data\.target: give both files"),
        ("--data.target b", r"--data\.target=b without --data\.source: give both files"),
        ("--data.tsv t --data.source a --data.target b", r"--data\.tsv=t and --data\.source=a: "),
        ("--resume /nowhere", r"/nowhere/config\.json is missing: /nowhere is not a run directory"),
        ("--resume", r"Missing value for argument '--resume'"),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_be_used_is_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(InputError, match=message) as refused:
        parse(arguments.split())
    assert "\n" not in str(refused.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.d_modle", 8, r"training\.model: unknown key 'd_modle': did you mean d_model\?"),
        ("zzz", 8, r"training: unknown key 'zzz': it has preset, steps"),
        ("steps", ..., r"training: key 'steps' is missing"),
        ("optimizer.b1", ..., r"training\.optimizer: key 'b1' is missing"),
        ("model", [], r"training\.model: must be an object with named values, not \[\]"),
        ("seed", "0", r"training: seed='0': must be a whole number"),
        ("seed", True, r"training: seed=True: must be a whole number"),
        ("steps", 3.0, r"training: steps=3\.0: must be a whole number"),
        ("steps", 0, r"training: steps=0: must be a whole number of at least 1"),
        ("model.dropout", "0.1", r"training\.model: dropout='0\.1': must be a number"),
        ("model.dropout", None, r"training\.model: dropout=None: must be a number"),
        ("model.num_heads", 5, r"training\.model: d_model=\d+ is not divisible by num_heads=5"),
        ("model.activation", "tanh", r"training\.model: activation='tanh': must be one of gelu"),
        ("compute_dtype", 16, r"training: compute_dtype=16: must be text"),
        ("data.source", 5, r"training\.data: source=5: must be text"),
        ("data.source", "a", r"training\.data: --data\.source=a without --data\.target"),
    ],
)
def test_a_saved_config_is_refused_by_file_key_and_value(tmp_path, name, value, message):
    path = tmp_path / "config.json"
    values = with_change(to_json(PRESETS["small"]), name, value)
    path.write_text(json.dumps({"training": values}))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {message}") as refused:
        load_config(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"training": {', r"is not valid JSON \(.*\): restore it from a copy"),
        (b"\xff\xfe", r"is not valid JSON"),
        (b"[]", r": must hold a JSON object"),
        (b"{}", r": training: must be an object with named values, not None"),
    ],
)
def test_a_damaged_config_is_refused_by_its_file(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}:? ?{message}"):
        load_config(path)


@pytest.mark.parametrize(
    ("show", "settings"),
    [
        (lambda: parse(["--help"]), TrainConfig),
        (lambda: parse(["lm", "--help"]), LanguageConfig),
        (lambda: main(["generate", "--help"]), Generate),
        (lambda: main(["tokenize", "--help"]), Tokenize),
    ],
)
def test_help_explains_every_flag(capsys, show, settings):
    with pytest.raises(SystemExit) as ended:
        show()
    assert not ended.value.code
    # Frames away, and lines joined that are broken for the width of a terminal.
    text = " ".join(re.sub(r"[│╭╮╰╯─|+]", " ", capsys.readouterr().out).split())
    _, text = text.split("show this help message and exit")
    names = [name for name in flags(settings) if name not in ("--run-dir", "--file")]
    places = [re.search(rf"{re.escape(name)} [A-Z{{]", text) for name in names]
    for name, place in zip(names, places, strict=True):
        assert place, f"{name} is not in --help"
    # In the order of the help, which has groups last.
    found = sorted(zip(places, names, strict=True), key=lambda each: each[0].start())
    for (place, name), (following, _) in itertools.pairwise([*found, (None, "")]):
        description = text[place.end() : following.start() if following else None]
        words = re.findall(r"[a-z]{2,}", description.split("(default")[0])
        assert len(words) >= 2, f"{name} has no description"


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "generate" in text
    assert "Continue prompts with the best" in text
    assert "Write text as a file of tokens" in text


@pytest.mark.parametrize("name", LANGUAGE_PRESETS)
def test_every_language_preset_can_be_asked_for_and_read_back(name):
    config = parse(["lm", "--preset", name])
    assert config == LANGUAGE_PRESETS[name]
    assert config.preset == name
    values = json.loads(json.dumps(to_json(config)))
    assert from_dict(LanguageConfig, values, place="here") == config


def test_texts_and_sizes_of_a_language_model_are_flags():
    flags = (
        "lm --data.text a.txt folder --data.separator endoftext --model.architecture gpt2 "
        "--model.d-model 64 --model.tied False --optimizer.schedule noam"
    )
    config = parse(flags.split())
    assert config.data.text == (Path("a.txt"), Path("folder"))
    model = config.model.config(100)
    assert (model.position, model.layer.norm, model.layer.d_ff) == ("learned", "layer", 256)
    assert not model.tied
    llama = LANGUAGE_PRESETS["shakespeare"].model.config(100)
    assert (llama.position, llama.layer.norm, llama.layer.d_ff) == ("rotary", "rms", 352)
    assert llama.layer.gated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data.text a --data.jsonl b", r"--data\.text and --data\.jsonl: give one of them"),
        ("--data.held-out 0.5", r"held_out=0\.5: must be above 0 and at most 0\.25"),
        ("--data.tokenizer words", r"invalid choice 'words'"),
        ("--model.num-heads 7", r"d_model=128 is not divisible by num_heads=7"),
        ("--model.num-kv-heads 3", r"num_heads=4 is not divisible by num_kv_heads=3"),
        ("--model.context 4096", r"tokens_per_batch=2048: a row alone has model\.context=4096"),
        ("--optimizer.weight-decay -1", r"weight_decay=-1\.0: must be at least 0 and finite"),
        ("--optimizer.final-fraction 2", r"final_fraction=2\.0: must be from 0 to 1"),
        ("--preset small", r"--preset=small: must be one of shakespeare, tiny"),
        ("--vocab-size 9", r"--vocab-size: did you mean --data\.vocab-size\?"),
    ],
)
def test_a_language_command_line_that_cannot_be_used_is_refused(arguments, message, capsys):
    with pytest.raises(InputError, match=message) as refused:
        parse(["lm", *arguments.split()])
    assert "\n" not in str(refused.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", {1: 0.02, 100: 2.0, 200: 0.2}),
        ("wsd", {1: 0.02, 100: 2.0, 120: 2.0, 160: 1.1, 200: 0.2}),
    ],
)
def test_translation_can_use_every_schedule(name, expected):
    optimizer = dataclasses.replace(
        PRESETS["tiny"].optimizer, schedule=name, learning_rate=1.0, learning_rate_scale=2.0,
        decay_fraction=0.4,
    )  # fmt: skip
    config = dataclasses.replace(PRESETS["tiny"], optimizer=optimizer)
    schedule = make_schedule(config, 512)
    for step, rate in expected.items():
        assert float(schedule(step - 1)) == pytest.approx(rate, rel=1e-6)
