"""What a task gives to the training loop: translation and language models share everything else."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from flax import nnx

from jax_transformer.models.parameters import Tree
from jax_transformer.porting.text import AnyTokenizer
from jax_transformer.training.loss import LossSum
from jax_transformer.training.run import AnyModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is reported of one set of held-out text."""

    loss: float
    """Nats per token, without label smoothing."""
    score: float
    """What the best model is chosen by: the higher, the better."""
    numbers: Mapping[str, float | str]
    """What else is measured, and how: `bleu` and `signature`, or `bits_per_byte`."""
    samples: list[dict[str, str]]
    """A few texts, each by what it is: `source`, `reference`, `hypothesis`, or `prompt`,
    `continuation`."""


class Evaluator(Protocol):
    """Evaluates parameters on one set of held-out text, with programs that are compiled once."""

    def __call__(self, params: Tree) -> Evaluation:
        """Loss, scores, samples."""
        ...

    def files(self, params: Tree, evaluation: Evaluation) -> Mapping[str, Any]:
        """What the report shows besides, as JSON: by the name of the file in the run directory."""
        ...

    def test(self, params: Tree) -> Mapping[str, float | str]:
        """The numbers to quote of the finished model."""
        ...


class Batches(Protocol):
    """Training batches, a pure function of the step."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def at(self, step: int) -> Any:
        """As `data.batches.Batch` or `data.packing.PackedBatch`: arrays, rows first."""
        ...


class Task(Protocol):
    """What is trained, on what: read and checked before anything is written."""

    @property
    def tokenizer(self) -> AnyTokenizer:
        """Of the text, or of both languages."""
        ...

    @property
    def model_config(self) -> AnyModelConfig:
        """What is trained."""
        ...

    @property
    def batches(self) -> Batches:
        """What it is trained on."""
        ...

    @property
    def testing(self) -> str:
        """What is said while the test set is scored."""
        ...

    @property
    def loss(self) -> Callable[..., LossSum]:
        """As `training.step.batch_loss`."""
        ...

    def check(self, batch: Any) -> None:
        """Refuse a batch that the model would read nonsense from, with an `InputError`."""
        ...

    def tokens(self, batch: Any) -> int:
        """What a batch counts for in tokens per second."""
        ...

    def digest(self) -> str:
        """A hash of all text, by which a resumed run knows its data again."""
        ...

    def summary(self) -> str:
        """The data, for the terminal."""
        ...

    def evaluators(self, graphdef: nnx.GraphDef, buffers: Tree) -> tuple[Evaluator, Evaluator]:
        """Of the validation and of the test set, for a model with its layers as a list."""
        ...

    def closing(self, path: Path, numbers: Mapping[str, float | str]) -> tuple[str, str]:
        """The test's numbers in words, and how to use the run at `path`."""
        ...
