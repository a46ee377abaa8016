"""The whole of a training run: data, model, steps, evaluations, checkpoints, report."""

import json
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.mesh import replicated, shard_rows
from jax_transformer.training.metrics import MetricsWriter, replace_file
from jax_transformer.training.progress import ProgressDisplay
from jax_transformer.training.report import write_report
from jax_transformer.training.run import load_best, resume_command
from jax_transformer.training.settings import RunConfig
from jax_transformer.training.setup import Setup, checkpoint_tree, prepare
from jax_transformer.training.step import StepMetrics
from jax_transformer.training.task import Evaluation
from jax_transformer.training.window import LogWindow

READING = {
    "new": "Reading the data, learning tokens ...",
    "init": "Reading the model and the data ...",
    "resume": "Reading the data ...",
}


def train(config: RunConfig) -> None:
    """Train as `config` says, from the beginning or where the run stopped.

    Raises:
        InputError: data, settings or a run directory that cannot be used, before anything is
            written; or the run was interrupted (after saving it).
    """
    with jax.default_matmul_precision(config.matmul_precision):
        print(READING["resume" if config.resume else "init" if config.init_from else "new"])
        with keyboard_interrupt_says("interrupted before the first step: nothing was saved"):
            setup = prepare(config)
            print(setup.summary(), flush=True)
        path = setup.run.path
        resume = f"go on with {resume_command(path, config.task)}"
        with keyboard_interrupt_says(f"stopped at once, without saving {path}: {resume}"):
            last_step = take_steps(setup)
        if last_step < config.steps:
            write_report(path)
            raise InputError(
                f"interrupted at step {last_step:,} of {config.steps:,}, saved in {path}: {resume}"
            )
        with keyboard_interrupt_says(f"interrupted after the last step of {path}: {resume}"):
            finish(setup)


@contextmanager
def keyboard_interrupt_says(message: str) -> Generator[None]:
    """End on Ctrl-C with one line that tells how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise InputError(message) from None


def take_steps(setup: Setup) -> int:
    """Make or reopen the run directory and train; returns the step reached, which is saved.

    Raises:
        InputError: the run directory or a checkpoint cannot be written.
    """
    run, config = setup.run, setup.config
    if config.resume is None:
        run.create(setup.saved_config(), setup.task.tokenizer, setup.brought[1])
        metrics = MetricsWriter(run.path)
    else:
        run.save_config(setup.saved_config())
        metrics = MetricsWriter.resume(run.path, setup.start_step)
    with (
        metrics,
        CheckpointStore(run.latest, write=True) as latest,
        CheckpointStore(run.best, write=True, by_score=True) as best,
        ProgressDisplay(config.steps, setup.start_step) as display,
        interruption(display) as interrupted,
    ):
        return Trainer(setup, metrics, latest, best, display).run(interrupted)


def finish(setup: Setup) -> None:
    """Score the best model on the test set, write the report and say how to use the run."""
    run = setup.run
    print(f"\n{setup.task.testing}", flush=True)
    model = load_best(run.path, replicated(setup.mesh))
    numbers = setup.test_evaluator.test(model.params)
    with MetricsWriter.resume(run.path, setup.config.steps) as metrics:
        metrics.write(setup.config.steps, kind="test", **numbers)
    report = write_report(run.path)
    result, use = setup.task.closing(run.path, numbers)
    print(f"{result}\nRun saved in {run.path}\nReport: {report}\n{use}")


class Trainer:
    """The loop over steps."""

    def __init__(
        self,
        setup: Setup,
        metrics: MetricsWriter,
        latest: CheckpointStore,
        best: CheckpointStore,
        display: ProgressDisplay,
    ):
        self.setup = setup
        self.config = setup.config
        self.metrics = metrics
        self.latest = latest
        self.best = best
        self.display = display
        self.state = setup.state
        self.step = setup.start_step
        self.window = setup.window
        self.started = time.monotonic()
        self._compiled: set[tuple[int, ...]] = set()

    def run(self, interrupted: Callable[[], bool]) -> int:
        """Steps up to the last or to an interruption, each followed by what is due; returns the
        step reached, which is saved."""
        while self.step < self.config.steps and not interrupted():
            batch = self.setup.batches.at(self.step)
            self.window = self.window.add(self._update(batch))
            self.step += 1
            learning_rate = self.setup.learning_rate(self.step - 1)
            self.display.update(
                self.step,
                loss=self.window.loss,
                learning_rate=learning_rate,
                tokens=self.setup.task.tokens(batch),
            )
            if self._due(self.config.log_every):
                self._log(learning_rate)
            if self._due(self.config.evaluate_every):
                self._evaluate()
            if self._due(self.config.checkpoint_every):
                self._save()
        self._save()
        return self.step

    def _log(self, learning_rate: float) -> None:
        self.metrics.write(
            self.step,
            kind="train",
            loss=self.window.loss,
            learning_rate=learning_rate,
            gradient_norm=self.window.gradient_norm,
            tokens_per_second=self.display.tokens_per_second,
            seconds=time.monotonic() - self.started,
        )
        self.window = LogWindow.empty()

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _update(self, batch: Any) -> StepMetrics:
        """One step; the first of each batch shape compiles, which the rates leave out."""
        if batch[0].shape in self._compiled:
            return self._dispatch(batch)
        self._compiled.add(batch[0].shape)
        with self.display.paused("compiling", recurs=False):
            return self._dispatch(batch)

    def _dispatch(self, batch: Any) -> StepMetrics:
        self.setup.task.check(batch)
        on_mesh = shard_rows(self.setup.mesh, batch)
        self.state, step_metrics = self.setup.train_step(self.state, self.setup.buffers, on_mesh)
        return jax.device_get(step_metrics)

    def _evaluate(self) -> None:
        with self.display.paused("evaluating"):
            params = self.setup.canonical(
                self.state.params if self.state.average is None else self.state.average
            )
            evaluation = self.setup.valid_evaluator(params)
            self._record(evaluation, params)
            best = self.best.best_score()
            # As good as before, but trained for longer: while BLEU is 0, and when it is not.
            if best is None or evaluation.score >= best:
                tree = {"params": params, "buffers": self.setup.buffers}
                self.best.save(self.step, tree, score=evaluation.score)
            write_report(self.setup.run.path)
        self.display.report_evaluation(
            self.step, evaluation.loss, evaluation.numbers, evaluation.samples
        )

    def _record(self, evaluation: Evaluation, params: Tree) -> None:
        self.metrics.write(
            self.step,
            kind="eval",
            loss=evaluation.loss,
            **evaluation.numbers,
            samples=evaluation.samples,
        )
        for name, content in self.setup.valid_evaluator.files(params, evaluation).items():
            replace_file(self.setup.run.path / name, json.dumps(content).encode())

    def _save(self) -> None:
        tree = self.setup.canonical(checkpoint_tree(self.state, self.window))
        self.latest.save(self.step, tree | {"buffers": self.setup.buffers})


@contextmanager
def interruption(display: ProgressDisplay) -> Generator[Callable[[], bool]]:
    """Whether Ctrl-C (or a termination signal) has come; a second one stops at once."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for caught, handler in before.items():
            signal.signal(caught, handler)
        # From a thread: the signal may have come while this one was printing.
        message = "stopping after this step and saving; Ctrl-C again stops at once, unsaved"
        threading.Thread(target=display.print, args=(message,)).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
