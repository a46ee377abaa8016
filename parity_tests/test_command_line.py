"""The two commands, as people call them: what they print, how they end, what they leave behind."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from jax_transformer.cli import main
from jax_transformer.errors import InputError
from jax_transformer.training import loop
from jax_transformer.training.metrics import read_metrics
from parity_tests import tiny

TRAIN = Path(__file__).parents[1] / "train.py"


@pytest.fixture(scope="module", autouse=True)
def quick_programs():
    with tiny.quick_programs():
        yield


@pytest.fixture
def run(tmp_path):
    """A copy of a finished run, to spoil."""
    return Path(shutil.copytree(tiny.finished().path, tmp_path / "run"))


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs a command that must be refused; returns its line and checks all else."""
    monkeypatch.chdir(tmp_path)
    # As after the restart in which `train.py` sets it: this process is that of all tests.
    monkeypatch.setenv("GLIBC_TUNABLES", "")

    def call(arguments):
        if not arguments or arguments[0] != "train":
            return main(arguments)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments[1:]])
        return runpy.run_path(str(TRAIN), run_name="__main__")

    def command(*arguments):
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as ended:
            call([str(argument) for argument in arguments])
        assert ended.value.code == 2
        assert contents(tmp_path) == before, "something was written"
        printed = capsys.readouterr()
        assert re.fullmatch(r"error: [^\n]+\n", printed.err)
        # At most what was being done when it turned out.
        assert printed.out in (
            "",
            "Reading the data ...\n",
            "Reading the data, learning tokens ...\n",
        )
        return printed.err.removeprefix("error: ").strip()

    return command


def contents(directory):
    """Every file under the directory, and what is in it."""
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def change_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def lines_file(path, *lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


GOOD = [f"{word} {other}".encode() for word in "abcd" for other in "efgh"]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (GOOD, GOOD[:-1], r"s\.txt has 16 lines but .*t\.txt has 15: line n of one must translate"),
        ([], GOOD, r"s\.txt is empty: it must hold one sentence a line"),
        (GOOD, [*GOOD[:4], b"caf\xe9", *GOOD[5:]],
         r"t\.txt:5: byte 0xe9 \(byte 4 of the line\) is not valid UTF-8: save the file as UTF-8"),
        ([b""] * 16, GOOD, r"s\.txt and .*t\.txt: no line has text on both sides"),
        (GOOD[:2], GOOD[:2], r"2 sentence pairs are too few to train, validate and test with"),
        ([*GOOD, b"a " * 600], [*GOOD, b"b"],
         r"the text 'a a .*' has 1201 tokens with its <eos>, more than the 512 that the model"),
        (None, GOOD, r"s\.txt: no such file"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used(tmp_path, refused, source, target, message):
    for name, lines in (("s.txt", source), ("t.txt", target)):
        if lines is not None:
            lines_file(tmp_path / name, *lines)
    line = refused(
        "train", "--data.source", tmp_path / "s.txt", "--data.target", tmp_path / "t.txt",
        "--data.vocab-size", 260,
    )  # fmt: skip
    assert re.search(message, line)


def test_tsv_lines_without_exactly_one_tab(tmp_path, refused):
    lines_file(tmp_path / "d.tsv", b"a\tb", b"c d", b"e\tf")
    line = refused("train", "--data.tsv", tmp_path / "d.tsv")
    assert re.search(r"d\.tsv:2: 0 tabs, where a line must be source<TAB>target", line)


def test_settings_that_cannot_be_used(refused):
    assert "unknown flag --stepz: did you mean --steps" in refused("train", "--stepz", 3)
    assert "--preset=huge: must be one of small, tiny" in refused("train", "--preset", "huge")
    assert "is not divisible by num_heads=7" in refused("train", "--model.num-heads", 7)
    assert "without --data.target" in refused("train", "--data.source", "a.txt")
    assert re.search(
        r"vocab_size=9: must be at least 260", refused("train", "--data.vocab-size", 9)
    )


def test_a_place_for_the_run_that_is_taken(run, tmp_path, refused):
    assert refused("train", "--out", run) == (
        f"--out {run} already holds a run: go on with it (--resume {run}) or choose another "
        f"directory"
    )
    assert f"--out {tmp_path} is not empty" in refused("train", "--out", tmp_path)
    file = run / "config.json"
    for out in (file, file / "below"):
        assert f"--out {out}: {file} is a file" in refused("train", "--out", out)


def test_a_run_that_cannot_be_resumed(run, tmp_path, refused):
    assert refused("train", "--resume", tmp_path / "none").endswith(
        f"{tmp_path / 'none'} is not a run directory of train.py"
    )
    assert refused("train", "--resume", run) == (
        f"--resume {run}: all 240 steps are done; to train on, say how far with --steps"
    )
    assert refused("train", "--resume", run, "--steps", 300, "--seed", 5) == (
        f"--resume {run} with seed=5: the run has 0 and keeps it; start a new run to change it"
    )
    shutil.rmtree(run / "checkpoints" / "latest" / "200")
    (run / "checkpoints" / "latest" / "240").rename(tmp_path / "240")
    assert refused("train", "--resume", run) == (
        f"{run} was stopped before its first checkpoint: delete it and start again"
    )


@pytest.mark.parametrize("command", [("train", "--resume"), ("generate", "--text", "a")])
def test_a_saved_config_that_cannot_be_used(run, refused, command):
    name, *options = command
    config, group = run / "config.json", "training" if name == "train" else "model"
    whole = config.read_bytes()
    change_json(config, lambda values: values[group].update(stepz=1))
    line = refused(name, *options, run)
    assert line.startswith(f"{config}: {group}: unknown key 'stepz': ")
    config.write_bytes(whole[:100])
    assert refused(name, *options, run).startswith(f"{config} is not valid JSON")
    config.unlink()
    assert refused(name, *options, run).startswith(f"{config} is missing")


def test_a_run_without_a_model_yet(run, refused):
    for step in (run / "checkpoints" / "best").iterdir():
        shutil.rmtree(step)
    message = (
        f"{run} has no model to use yet, its run was stopped before the first evaluation: go on "
        f"with python train.py --resume {run}"
    )
    assert refused("generate", run, "--text", "a") == message
    (run / "checkpoints" / "best").rmdir()
    assert refused("generate", run, "--text", "a") == message


def test_files_of_a_run_that_do_not_fit_each_other(run, refused):
    config, whole = run / "config.json", (run / "config.json").read_bytes()
    change_json(config, lambda values: values["model"].update(d_ff=16))
    line = refused("generate", run, "--text", "a")
    assert re.search(r"checkpoints/best/\d+ does not fit its run's config: params\.\S+ is "
                     r"float32\[\d+(, \d+)?\], must be ", line)  # fmt: skip
    config.write_bytes(whole)
    change_json(config, lambda v: v["model"].update(src_vocab_size=9, tgt_vocab_size=9))
    line = refused("generate", run, "--text", "a")
    assert re.search(r"tokenizer\.json has \d+ tokens, but the model in .* has 9: restore", line)
    config.write_bytes(whole)
    (run / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a tokenizer file" in refused("generate", run, "--text", "a")


def test_what_generate_cannot_translate_or_write(run, tmp_path, refused):
    text, taken = ("--text", "a"), lines_file(tmp_path / "taken.txt", b"precious")
    assert "give either --text" in refused("generate", run)
    assert "give either --text" in refused("generate", run, *text, "--input", taken)
    assert refused("generate", run, *text, "--output", taken) == (
        f"--output {taken} is there already: choose another name"
    )
    below = tmp_path / "none" / "out.txt"
    assert f"the directory {below.parent} is not there" in refused(
        "generate", run, *text, "--output", below
    )
    assert "no such file" in refused("generate", run, "--input", tmp_path / "none.txt")
    assert "41 tokens with its <eos>" in refused("generate", run, "--text", " ".join("a" * 40))
    assert "max_len=99: the model decodes 1 to 32" in refused(
        "generate", run, *text, "--max-len", 99
    )
    latin = lines_file(tmp_path / "latin.txt", b"a", b"\xe9")
    assert "latin.txt:2: byte 0xe9" in refused("generate", run, "--input", latin)
    assert "unknown flag --txet: did you mean --text?" in refused("generate", run, "--txet", "a")
    assert "no command: give one of generate" in refused()
    assert "'translate' is no command: give one of generate" in refused("translate")


def test_line_n_of_the_output_translates_line_n_of_the_input(run, tmp_path, capsys):
    sentences = lines_file(tmp_path / "in.txt", b"a b c", b"", b"  h ", b"a b c")
    output = tmp_path / "out.txt"
    main(["generate", str(run), "--input", str(sentences), "--output", str(output)])
    lines = output.read_text().split("\n")
    assert len(lines) == 5
    assert lines[0] == lines[3] != ""
    assert lines[1] == lines[4] == ""
    assert capsys.readouterr() == ("", "")
    main(["generate", str(run), "--input", str(sentences)])
    assert capsys.readouterr() == (output.read_text(), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt", "run"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("prepare", r"interrupted before the first step: nothing was saved"),
        ("finish", r"interrupted after the last step of {run}: go on with .* --resume {run}"),
    ],
)
def test_ctrl_c_outside_the_steps_says_how_to_go_on(tmp_path, function, message):
    settings = tiny.config(tmp_path, steps=1)
    with (
        mock.patch.object(loop, function, side_effect=KeyboardInterrupt),
        pytest.raises(InputError, match=f"^{message.format(run=settings.out)}$"),
    ):
        (loop.train if function == "prepare" else tiny.train)(settings)
    assert settings.out.exists() == (function == "finish")


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    settings = tiny.config(tmp_path, evaluate_every=1)

    def twice():
        tiny.press_ctrl_c()
        tiny.press_ctrl_c()

    message = f"^stopped at once, without saving {settings.out}: go on with .*{settings.out}$"
    with pytest.raises(InputError, match=message):
        tiny.train(settings, before_step=2, action=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_goes_on_with_other_devices_and_a_real_ctrl_c_saves_it(tmp_path):
    alone = tiny.config(tmp_path, evaluate_every=4, log_every=1)
    with pytest.raises(InputError, match="interrupted at step 2"):
        tiny.train(alone, before_step=1, action=tiny.press_ctrl_c)
    expected = Path(shutil.copytree(alone.out, tmp_path / "expected"))

    # On two devices to the end, then further until Ctrl-C.
    path = alone.out
    script = (
        "import runpy, sys\n"
        "for steps in ('8', '100000'):\n"
        f"    sys.argv = ['train.py', '--resume', {str(path)!r}, '--steps', steps]\n"
        "    try:\n"
        f"        runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
        "    finally:\n"
        "        assert 'torch' not in sys.modules\n"
    )
    flags = f"{tiny.TWO_DEVICES} {tiny.QUICK_FLAGS}"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1", "GLIBC_TUNABLES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and read_metrics(path)[-1]["step"] < 12:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert re.fullmatch(
        rf"error: interrupted at step \d+ of 100,000, saved in {path}: go on with python train\.py "
        rf"--resume {path}\n",
        errors,
    )
    assert process.returncode == 2
    assert "parameters on 2 CPU devices" in output
    assert "stopping after this step and saving; Ctrl-C again stops at once" in output
    assert "\x1b" not in output
    assert "Test BLEU" in output

    # The same numbers as on one device.
    settings = json.loads((expected / "config.json").read_text())
    settings["training"]["out"] = str(expected)
    (expected / "config.json").write_text(json.dumps(settings))
    tiny.train(tiny.resumed(tiny.config(tmp_path, out=expected, log_every=1), steps=12))
    one, two = (
        {line["step"]: line for line in read_metrics(run) if line["kind"] == "train"}
        for run in (expected, path)
    )
    for step in range(1, 13):
        # float32 sums in another order, magnified by Adam in a few updates.
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-4)
    # And back on one device, without another word about how far.
    stopped = max(two)
    with pytest.raises(InputError, match=f"interrupted at step {stopped + 1:,} of 100,000"):
        tiny.train(
            tiny.resumed(alone, steps=100_000), before_step=stopped, action=tiny.press_ctrl_c
        )


def test_the_installed_command_needs_no_framework_to_refuse():
    command = Path(sys.executable).with_name("jax-transformer")
    ended = subprocess.run(
        [command, "generate", "--txet", "a"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: [^\n]*\n", ended.stderr)
    modules = "jax_transformer, jax_transformer.cli, jax_transformer.training.config"
    script = f"import sys, {modules}; print({{'jax', 'flax', 'torch'}} & set(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "set()\n"
