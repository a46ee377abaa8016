"""Whole training runs in a second: a toy language, one batch shape, one compiled step.

`train` is the library's, but for one thing: runs of equal settings share their compiled programs,
which is nearly all of the time that such a run takes, and compile them quickly.
"""

import contextlib
import dataclasses
import functools
import io
import json
import random
import signal
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import jax
import numpy as np

from jax_transformer.config import Architecture
from jax_transformer.decoding import generate, program, translate
from jax_transformer.training import evaluate, language, loop
from jax_transformer.training.checkpoint import CheckpointStore
from jax_transformer.training.config import DataConfig, TrainConfig
from jax_transformer.training.language_config import (
    LanguageArchitecture,
    LanguageConfig,
    LanguageDataConfig,
)
from jax_transformer.training.settings import OptimizerConfig, RunConfig, to_json
from jax_transformer.training.setup import Setup, prepare

SOURCE_WORDS, TARGET_WORDS = "abcdefgh", "STUVWXYZ"
BATCHES_PER_EPOCH = 4

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiles the step in a third of the time."""

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same for a process of its own, in `XLA_FLAGS`."""

TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def write_pairs(path: Path, count: int = 120) -> Path:
    """`count` different pairs of 2 to 6 words, translated word by word."""
    generator, pairs = random.Random(0), {}
    while len(pairs) < count:
        words = [generator.randrange(8) for _ in range(generator.randint(2, 6))]
        source = " ".join(SOURCE_WORDS[word] for word in words)
        pairs[source] = " ".join(TARGET_WORDS[word] for word in words)
    text = "".join(f"{source}\t{target}\n" for source, target in pairs.items())
    path.write_text(text, encoding="utf-8")
    return path


def config(directory: Path, **changes: Any) -> TrainConfig:
    """Settings of a run in `directory/run`, with dropout and a running average."""
    data = directory / "pairs.tsv"
    settings = TrainConfig(
        steps=10,
        out=directory / "run",
        tokens_per_batch=256,
        evaluate_every=1000,
        checkpoint_every=1000,
        log_every=4,
        # That of all tests: programs compiled under another one are not shared.
        matmul_precision="highest",
        data=DataConfig(
            tsv=data if data.exists() else write_pairs(data),
            vocab_size=300,
            valid_size=10,
            test_size=10,
        ),
        model=Architecture(
            d_model=16,
            num_heads=2,
            d_ff=32,
            num_encoder_layers=1,
            num_decoder_layers=1,
            max_len=32,
            norm_placement="pre",
            activation="relu",
            tied_tables="all",
        ),
        optimizer=OptimizerConfig(warmup_steps=40, average_decay=0.9),
    )
    return dataclasses.replace(settings, **changes)


def write_documents(path: Path, count: int = 60) -> Path:
    """`count` stretches of the alphabet from a to h, round and round, a blank line between."""
    generator, letters = random.Random(0), "abcdefgh" * 8
    starts = [(generator.randrange(8), generator.randint(2, 30)) for _ in range(count)]
    documents = [letters[start : start + length] for start, length in starts]
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


def language_config(directory: Path, **changes: Any) -> LanguageConfig:
    """Settings of a language model's run in `directory/run`, with dropout and decay."""
    data = directory / "text.txt"
    settings = LanguageConfig(
        steps=10,
        out=directory / "run",
        tokens_per_batch=64,
        evaluate_every=1000,
        checkpoint_every=1000,
        log_every=4,
        matmul_precision="highest",
        sample_tokens=6,
        data=LanguageDataConfig(
            text=(data if data.exists() else write_documents(data),),
            separator="blank-line",
            tokenizer="chars",
        ),
        model=LanguageArchitecture(
            d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, context=16, dropout=0.1
        ),
        optimizer=OptimizerConfig(
            schedule="wsd", learning_rate=0.02, warmup_steps=2, weight_decay=0.1,
            label_smoothing=0.0,
        ),
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)


AnyConfig = TypeVar("AnyConfig", TrainConfig, LanguageConfig)


def resumed(settings: AnyConfig, **changes: Any) -> AnyConfig:
    """The settings that go on with a run."""
    return dataclasses.replace(settings, resume=settings.out, **changes)


_compiled: dict[str, Setup] = {}


def shared(setup: Setup) -> Setup:
    """`setup` with the programs of the first one of equal settings."""
    settings = to_json(setup.config)
    for name in ("out", "steps", "evaluate_every", "checkpoint_every", "log_every"):
        del settings[name]
    settings["rates_up_to"] = setup.config.steps if setup.config.has_end else None
    settings["data"] = setup.saved_config()["data"]
    if (name := json.dumps(settings)) not in _compiled:
        quick = jax.jit(setup.train_step, donate_argnums=0, compiler_options=QUICK)
        _compiled[name] = dataclasses.replace(setup, train_step=quick)
    first = _compiled[name]
    return dataclasses.replace(
        setup,
        train_step=first.train_step,
        valid_evaluator=first.valid_evaluator,
        test_evaluator=first.test_evaluator,
    )


class AtStep:
    """Batches that call `action` when the one of `step` is fetched."""

    def __init__(self, batches: Any, step: int, action: Callable[[], None]):
        self.batches, self.step, self.action = batches, step, action

    def __len__(self) -> int:
        return len(self.batches)

    def at(self, step: int) -> Any:
        if step == self.step:
            self.action()
        return self.batches.at(step)


def train(
    settings: RunConfig, *, before_step: int = -1, action: Callable[[], None] = lambda: None
) -> str:
    """`loop.train`, with `action` before the step of that number; returns what it prints."""

    def prepared(settings: RunConfig) -> Setup:
        setup = shared(prepare(settings))
        return dataclasses.replace(setup, batches=AtStep(setup.batches, before_step, action))

    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        mock.patch.object(loop, "prepare", prepared),
        quick_programs(),
    ):
        loop.train(settings)
    return output.getvalue()


quick_decode = jax.jit(
    translate.decode,
    static_argnames=("graphdef", "max_len", "rules"),
    compiler_options=QUICK,
)
quick_loss = jax.jit(evaluate.loss_sum, static_argnames="graphdef", compiler_options=QUICK)
quick_attention = jax.jit(
    evaluate.cross_attention, static_argnames="graphdef", compiler_options=QUICK
)
quick_language_loss = jax.jit(
    language.language_loss, static_argnames="graphdef", compiler_options=QUICK
)
quick_prefill = jax.jit(
    program.prefill.__wrapped__,
    static_argnames=("structure", "strategy", "slots", "end_ids"),
    compiler_options=QUICK,
)
quick_step = jax.jit(
    program.step.__wrapped__,
    static_argnames=("structure", "strategy", "end_ids"),
    donate_argnames="state",
    compiler_options=QUICK,
)


@contextlib.contextmanager
def quick_programs() -> Generator[None]:
    """Evaluate and translate with programs that are compiled quickly, too."""
    with (
        mock.patch.object(translate, "decode", quick_decode),
        mock.patch.object(evaluate, "loss_sum", quick_loss),
        mock.patch.object(evaluate, "cross_attention", quick_attention),
        mock.patch.object(language, "loss_sum", quick_language_loss),
        mock.patch.object(generate, "prefill", quick_prefill),
        mock.patch.object(generate, "step", quick_step),
    ):
        yield


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@functools.cache
def saved(run: Path, name: str) -> tuple[int | None, dict[str, np.ndarray]]:
    """The step of a run's `latest` or `best` checkpoint, and every array in it by name."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with CheckpointStore(run / "checkpoints" / name, by_score=name == "best") as store:
        step = store.chosen_step()
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            store._manager.item_metadata(step),
        )
        return step, named(store.restore(like))


def named(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a tree by path."""
    leaves = jax.tree.flatten_with_path(jax.device_get(tree))[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Equal names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


class Finished:
    """A run that went through to its end: its settings and what it printed."""

    def __init__(self, settings: RunConfig, output: str):
        self.settings, self.output = settings, output
        assert settings.out is not None
        self.path: Path = settings.out


_directory = tempfile.TemporaryDirectory(prefix="tiny-run-")


@functools.cache
def finished() -> Finished:
    """One run for all tests that only read it; long enough to learn most of the toy language."""
    settings = config(
        Path(_directory.name), steps=240, evaluate_every=60, checkpoint_every=100, log_every=20
    )
    return Finished(settings, train(settings))
