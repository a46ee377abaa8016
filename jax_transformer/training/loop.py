"""The whole of a training run: data, model, steps, evaluations, checkpoints, report."""

import json
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import numpy as np

from jax_transformer.data.batches import Batch
from jax_transformer.errors import InputError
from jax_transformer.models.parameters import Tree
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import TrainConfig
from jax_transformer.training.evaluate import Evaluation
from jax_transformer.training.mesh import shard_rows
from jax_transformer.training.metrics import MetricsWriter, read_metrics, replace_file
from jax_transformer.training.progress import ProgressDisplay
from jax_transformer.training.report import write_report
from jax_transformer.training.run import load_best
from jax_transformer.training.setup import Setup, prepare
from jax_transformer.training.step import StepMetrics


def train(config: TrainConfig) -> None:
    """Train as `config` says, from the beginning or where the run stopped.

    Raises:
        InputError: data, settings or a run directory that cannot be used, before anything is
            written; or the run was interrupted (after saving it).
    """
    jax.config.update("jax_default_matmul_precision", config.matmul_precision)
    setup = prepare(config)
    run = setup.run
    print(setup.summary())
    if config.resume is None:
        run.create(config, setup.model_config, setup.tokenizer)
        metrics = MetricsWriter(run.path)
    else:
        metrics = MetricsWriter.resume(run.path, setup.start_step)
    with (
        metrics,
        CheckpointStore(run.latest) as latest,
        CheckpointStore(run.best) as best,
        ProgressDisplay(config.steps, setup.start_step) as display,
        interruption() as interrupted,
    ):
        trainer = Trainer(setup, metrics, latest, best, display)
        last_step = trainer.run(interrupted)
    if last_step < config.steps:
        write_report(run.path)
        raise InputError(
            f"interrupted at step {last_step:,} of {config.steps:,}, saved in {run.path}: go on "
            f"with python train.py --resume {run.path}"
        )
    finish(setup)


def finish(setup: Setup) -> None:
    """Score the best model on the test set, write the report and say how to use the run."""
    run = setup.run
    model = load_best(run.path)
    test = setup.test_evaluator(model.params)
    with MetricsWriter.resume(run.path, setup.config.steps) as metrics:
        metrics.write(
            setup.config.steps,
            kind="test",
            bleu=test.score.bleu,
            signature=test.score.signature,
        )
    report = write_report(run.path)
    print(
        f"\nTest BLEU {test.score.bleu:.1f} on {len(setup.corpus.test)} sentences, greedy "
        f"({test.score.signature})\n"
        f"Run saved in {run.path}\n"
        f"Report: {report}\n"
        f"Translate your own sentence:\n\n"
        f'    jax-transformer generate {run.path} --text "{setup.corpus.test.sources[0]}"\n'
    )


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
        self.best_bleu = max(
            (line["bleu"] for line in past_evaluations(setup)), default=float("-inf")
        )
        self._compiled: set[tuple[int, ...]] = set()

    def run(self, interrupted: Callable[[], bool]) -> int:
        """Steps up to the last or to an interruption, each followed by what is due; returns the
        step reached, which is saved."""
        window = LogWindow()
        while self.step < self.config.steps and not interrupted():
            batch = self.setup.batches.at(self.step)
            step_metrics = self._update(batch)
            self.step += 1
            tokens = int(batch.target_lengths.sum())
            window.add(step_metrics)
            learning_rate = self.setup.learning_rate(self.step - 1)
            self.display.update(
                self.step, loss=window.loss, learning_rate=learning_rate, tokens=tokens
            )
            if self._due(self.config.log_every):
                self.metrics.write(
                    self.step,
                    kind="train",
                    loss=window.loss,
                    learning_rate=learning_rate,
                    gradient_norm=window.gradient_norm,
                    tokens_per_second=self.display.tokens_per_second,
                    seconds=window.seconds(),
                )
                window = LogWindow(window.started)
            if self._due(self.config.evaluate_every):
                self._evaluate()
            if self._due(self.config.checkpoint_every):
                self._save()
        self._save()
        return self.step

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _update(self, batch: Batch) -> StepMetrics:
        """One step; the first of each batch shape compiles, which the rates leave out."""
        if batch.source.shape in self._compiled:
            return self._dispatch(batch)
        self._compiled.add(batch.source.shape)
        with self.display.paused("compiling", recurs=False):
            return self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> StepMetrics:
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
            if evaluation.score.bleu > self.best_bleu:
                self.best_bleu = evaluation.score.bleu
                self.best.save(self.step, {"params": params, "buffers": self.setup.buffers})
            write_report(self.setup.run.path)
        self.display.report_evaluation(
            self.step,
            evaluation.loss,
            evaluation.score.bleu,
            evaluation.score.signature,
            evaluation.samples,
        )

    def _record(self, evaluation: Evaluation, params: Tree) -> None:
        self.metrics.write(
            self.step,
            kind="eval",
            loss=evaluation.loss,
            bleu=evaluation.score.bleu,
            signature=evaluation.score.signature,
            samples=evaluation.samples,
        )
        sample = evaluation.samples[0]
        if sample["hypothesis"]:
            attention = self.setup.valid_evaluator.attention(
                params, sample["source"], sample["hypothesis"]
            )
            replace_file(self.setup.run.attention, json.dumps(attention).encode())

    def _save(self) -> None:
        self.latest.save(self.step, self.setup.canonical(self.state._asdict()))


class LogWindow:
    """Means over the steps since the last line of the metrics file."""

    def __init__(self, started: float | None = None):
        self.started = time.monotonic() if started is None else started
        self._total = 0.0
        self._count = 0
        self._norms: list[float] = []

    def add(self, step: StepMetrics) -> None:
        self._total += float(step.loss.total)
        self._count += int(step.loss.count)
        self._norms.append(float(step.gradient_norm))

    @property
    def loss(self) -> float:
        """Nats per token, label smoothing included."""
        return self._total / max(self._count, 1)

    @property
    def gradient_norm(self) -> float:
        """Mean over steps, before clipping."""
        return float(np.mean(self._norms))

    def seconds(self) -> float:
        """Since training started, or was resumed."""
        return time.monotonic() - self.started


def past_evaluations(setup: Setup) -> list[dict[str, Any]]:
    """What a resumed run has already recorded."""
    return [line for line in read_metrics(setup.run.path) if line["kind"] == "eval"]


@contextmanager
def interruption() -> Generator[Callable[[], bool]]:
    """Whether Ctrl-C (or a termination signal) has come; a second one stops at once."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for caught, handler in before.items():
            signal.signal(caught, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
