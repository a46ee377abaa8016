import dataclasses
import json
import math
import shlex

import numpy as np
import pytest

from jax_transformer.cli import main
from jax_transformer.config import Architecture
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.training.checkpoint import CheckpointStore, leaf_types
from jax_transformer.training.config import load_config
from jax_transformer.training.loop import Trainer
from jax_transformer.training.metrics import MetricsWriter, read_metrics
from jax_transformer.training.progress import ProgressDisplay
from jax_transformer.training.setup import prepare, restore
from parity_tests import tiny

# What a resumed run cannot repeat, and need not: how fast it was.
TIMES = ("tokens_per_second", "seconds")


def lines(settings, kind):
    """The metrics of a kind, without the times."""
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in read_metrics(settings.out)
        if line["kind"] == kind
    ]


def test_a_run_directory_holds_all_that_is_needed_to_use_inspect_and_resume_it():
    run = tiny.finished()
    assert {path.name for path in run.path.iterdir()} == {
        "config.json", "tokenizer.json", "checkpoints", "metrics.jsonl", "tensorboard",
        "attention.json", "report.html",
    }  # fmt: skip
    assert load_config(run.path / "config.json") == run.settings
    assert Tokenizer.load(run.path / "tokenizer.json").decode([2, 3]) == ""
    with CheckpointStore(run.path / "checkpoints" / "latest") as latest:
        assert latest.chosen_step() == 240
    with CheckpointStore(run.path / "checkpoints" / "best", by_score=True) as best:
        evaluations = lines(run.settings, "eval")
        assert best.best_score() == max(line["bleu"] for line in evaluations)
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))
    report = (run.path / "report.html").read_text()
    assert evaluations[-1]["samples"][0]["reference"] in report


def test_the_model_learns_and_says_how_well():
    run = tiny.finished()
    losses = [line["loss"] for line in lines(run.settings, "eval")]
    # From ln 276 = 5.6 nats to ln 8 = 2.1 by knowing the words of the language, and below that
    # only by reading the source.
    assert losses[0] < 0.5 * math.log(276)
    assert losses[-1] < 0.9 * math.log(8)
    (test,) = lines(run.settings, "test")
    assert 0.0 < test["bleu"] <= 100.0
    assert f"Test BLEU {test['bleu']:.1f} on 10 sentences" in run.output


def test_metrics_have_each_step_once_and_the_rate_that_was_used():
    run = tiny.finished()
    train = lines(run.settings, "train")
    assert [line["step"] for line in train] == list(range(20, 241, 20))
    assert [line["step"] for line in lines(run.settings, "eval")] == [60, 120, 180, 240]
    for line in train:
        step = line["step"]
        expected = 16**-0.5 * min(step**-0.5, step * 40**-1.5)
        assert line["learning_rate"] == pytest.approx(expected, rel=1e-6)


def test_the_last_line_printed_is_a_command_that_translates(capsys):
    run = tiny.finished()
    program, *arguments = shlex.split(run.output.strip().splitlines()[-1])
    assert program == "jax-transformer"
    with tiny.quick_programs():
        main(arguments)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1
    assert set(printed.split()) <= set(tiny.TARGET_WORDS)


def test_progress_evaluations_and_samples_are_shown():
    output = tiny.finished().output
    evaluation = lines(tiny.finished().settings, "eval")[-1]
    assert f"step 240  held-out loss {evaluation['loss']:.3f}" in output
    assert evaluation["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    for sample in evaluation["samples"]:
        assert f"source     {sample['source']}\n" in output
        assert f"reference  {sample['reference']}\n" in output


def test_the_step_is_compiled_once_for_each_shape_of_batches(tmp_path):
    setup = tiny.shared(prepare(dataclasses.replace(tiny.finished().settings, out=tmp_path / "a")))
    assert len(setup.batches) == tiny.BATCHES_PER_EPOCH
    assert setup.train_step._cache_size() == len(setup.batches.buckets)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Two and a half epochs, with evaluations and checkpoints at other steps than log lines."""
    settings = tiny.config(tmp_path_factory.mktemp("whole"), evaluate_every=7, checkpoint_every=5)
    tiny.train(settings)
    return settings


def assert_same_run(settings, expected):
    """Every number that two runs have saved or logged, but for times."""
    for kind in ("train", "eval", "test"):
        assert lines(settings, kind) == lines(expected, kind)
    for name in ("latest", "best"):
        step, arrays = tiny.saved(settings.out, name)
        expected_step, expected_arrays = tiny.saved(expected.out, name)
        assert step == expected_step
        tiny.assert_same_bits(arrays, expected_arrays)


# Steps done at Ctrl-C: inside the first epoch, between two log lines, with borders of epochs to
# come; at such a border, where a log line is due.
@pytest.mark.parametrize("steps", [1, tiny.BATCHES_PER_EPOCH])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, uninterrupted, steps):
    settings = tiny.config(tmp_path, evaluate_every=7, checkpoint_every=5)
    with pytest.raises(InputError, match=rf"^interrupted at step {steps} of 10, saved in .*: go on "
                       rf"with python train.py --resume {settings.out}$"):  # fmt: skip
        tiny.train(settings, before_step=steps - 1, action=tiny.press_ctrl_c)
    tiny.train(tiny.resumed(settings))
    assert_same_run(settings, uninterrupted)


def test_a_killed_run_goes_on_from_its_last_checkpoint_bit_for_bit(tmp_path, uninterrupted):
    settings = tiny.config(tmp_path, evaluate_every=7, checkpoint_every=5)

    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        tiny.train(settings, before_step=8, action=fail)
    # Written after the checkpoint of step 5: lines that are written again, and a best model.
    assert [line["step"] for line in lines(settings, "train")] == [4, 8]
    tiny.train(tiny.resumed(settings))
    assert_same_run(settings, uninterrupted)


def test_a_run_stopped_after_its_last_step_is_only_finished(tmp_path, uninterrupted):
    settings = tiny.config(tmp_path, evaluate_every=7, checkpoint_every=5)
    tiny.train(settings)
    metrics = settings.out / "metrics.jsonl"
    *before, test = metrics.read_text().splitlines(keepends=True)
    assert json.loads(test)["kind"] == "test"
    metrics.write_text("".join(before))
    tiny.train(tiny.resumed(settings), before_step=10, action=pytest.fail)
    assert_same_run(settings, uninterrupted)


def test_what_is_restored_is_what_was_saved(tmp_path):
    settings = tiny.config(tmp_path, steps=3)
    setup = tiny.shared(prepare(settings))
    setup.run.create(setup.saved_config(), setup.task.tokenizer)
    with (
        MetricsWriter(settings.out) as metrics,
        CheckpointStore(setup.run.latest, write=True) as latest,
        CheckpointStore(setup.run.best, write=True, by_score=True) as best,
        ProgressDisplay(3, quiet=True) as display,
    ):
        trainer = Trainer(setup, metrics, latest, best, display)
        trainer.run(interrupted=lambda: trainer.step == 2)
    restored = prepare(tiny.resumed(settings))
    tiny.assert_same_bits(
        tiny.named((restored.state, restored.window)), tiny.named((trainer.state, trainer.window))
    )
    _, moments, schedule = restored.state.opt_state
    assert moments.count == schedule.count == restored.start_step == 2
    for moment in (moments.mu, moments.nu):
        assert all(np.abs(leaf).max() > 0.0 for leaf in tiny.named(moment).values())


def test_a_finished_run_trains_on_with_more_steps(tmp_path, uninterrupted):
    settings = tiny.config(tmp_path, steps=6)
    tiny.train(settings)
    with pytest.raises(InputError, match=r"all 6 steps are done; to train on, say how far with --"):
        tiny.train(tiny.resumed(settings))
    tiny.train(tiny.resumed(settings, steps=10))
    step, arrays = tiny.saved(settings.out, "latest")
    assert step == 10
    tiny.assert_same_bits(arrays, tiny.saved(uninterrupted.out, "latest")[1])
    # The run knows its new length: `--resume` alone would go on with it after an interruption.
    assert load_config(settings.out / "config.json").steps == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "with seed=1: the run has 0 and keeps it"),
        ({"tokens_per_batch": 8}, "with tokens_per_batch=8: the run has 256"),
        ({"model": Architecture(dropout=0.5)}, "with model.d_model=512: the run has 16"),
        ({"steps": 9}, "all 10 steps are done"),
    ],
)
def test_a_resumed_run_keeps_its_settings(uninterrupted, changes, message):
    with pytest.raises(InputError, match=message):
        prepare(tiny.resumed(uninterrupted, **({"steps": 20} | changes)))


def test_a_resumed_run_keeps_its_data(tmp_path):
    settings = tiny.config(tmp_path, steps=1)
    tiny.train(settings)
    data = settings.data.tsv
    data.write_text(data.read_text().replace("a b", "b a"))
    with pytest.raises(InputError, match=r"the training data are not those that the run was star"):
        prepare(tiny.resumed(settings, steps=2))


def test_stacked_and_listed_layers_train_alike_and_read_each_others_checkpoints(tmp_path):
    deep = dataclasses.replace(
        tiny.config(tmp_path).model, num_encoder_layers=2, num_decoder_layers=1
    )
    runs = {}
    for layout in ("listed", "stacked"):
        (tmp_path / layout).mkdir()
        runs[layout] = tiny.config(tmp_path / layout, layers=layout, model=deep)
        # Not to the end: evaluations take the longest to compile.
        with pytest.raises(InputError, match="interrupted at step 4"):
            tiny.train(runs[layout], before_step=3, action=tiny.press_ctrl_c)
    losses = {name: lines(settings, "train")[0]["loss"] for name, settings in runs.items()}
    # The same dropout and sums in another order, four updates on.
    assert losses["stacked"] == pytest.approx(losses["listed"], rel=1e-5)

    setups = {name: prepare(tiny.resumed(settings)) for name, settings in runs.items()}
    saved = {name: setup.canonical(setup.state._asdict()) for name, setup in setups.items()}
    assert leaf_types(saved["stacked"]) == leaf_types(saved["listed"])
    assert "params.encoder.layers.1.self_attn.q_proj.kernel" in leaf_types(saved["stacked"])
    for reader, written in (("stacked", "listed"), ("listed", "stacked")):
        setup, run = setups[reader], setups[written].run
        start = (setup.state, setup.buffers)
        state, _, _ = restore(run, setup.like, start, setup.mesh, setup.stacked)
        assert leaf_types(state._asdict()) == leaf_types(setup.state._asdict())
        tiny.assert_same_bits(
            tiny.named(setup.canonical(state._asdict())), tiny.named(saved[written])
        )
