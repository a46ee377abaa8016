"""The numbers of a run: JSON lines for programs, TensorBoard events for people."""

import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, SupportsFloat

from jax_transformer.errors import InputError
from jax_transformer.training.tensorboard import EventFile

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"

Kind = Literal["train", "eval", "test"]
Value = SupportsFloat | str | Sequence[Mapping[str, str]] | None

# JSON has no such numbers. These spellings are those of the protocol buffers' JSON mapping;
# Python's `float`, JavaScript's `Number` and pandas' `to_numeric` read them back.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends metrics to `run_dir/metrics.jsonl` and `run_dir/tensorboard/`.

    Each `write` is one JSON object on one line, `{"step": ..., "kind": ..., ...}`, handed to the
    operating system before it returns, so that a killed run keeps all of its lines. The kinds,
    and what this project's training writes with each:

    - `train`: `loss` (nats per token), `learning_rate`, `gradient_norm`, `tokens_per_second`,
      `seconds` (since training started or was resumed);
    - `eval`, on the held-out set: `loss` (nats per token); of translation `bleu` with its
      `signature` and `samples`, a list of `{"source", "reference", "hypothesis"}`; of a language
      model `bits_per_byte` and `samples`, a list of `{"prompt", "continuation"}`;
    - `test`: `bleu` with its `signature`, or `loss` and `bits_per_byte`.

    Numbers stay plain JSON numbers; those that JSON lacks are the strings "NaN", "Infinity" and
    "-Infinity", which `read_metrics` turns back.
    """

    def __init__(self, run_dir: str | Path, *, purge_step: int | None = None) -> None:
        """Start the metrics of a new run; `resume` goes on with those of an old one.

        Args:
            run_dir: made if it is missing.
            purge_step: passed by `resume`, the first step that is written anew.

        Raises:
            InputError: `run_dir` already holds the metrics of a run.
        """
        run_dir = Path(run_dir)
        path = run_dir / METRICS_FILE
        if purge_step is None and path.exists():
            raise InputError(
                f"{path} already holds the metrics of a run: "
                f"resume that run or choose another directory"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._events = EventFile(run_dir / TENSORBOARD_DIRECTORY, purge_step=purge_step)

    @classmethod
    def resume(cls, run_dir: str | Path, step: int) -> "MetricsWriter":
        """Go on with the metrics of a run whose checkpoint was taken after `step`.

        Lines of later steps (written between the checkpoint and the kill) are dropped, and so
        is half a line at the end, so that the file has each step once; TensorBoard is told to
        hide the same. The file is replaced in one move: a kill leaves the old one or the new one.

        Raises:
            InputError: there is no metrics file, or a line of it is not a metrics line.
        """
        path = Path(run_dir) / METRICS_FILE
        kept = [line for line, metrics in _parse(path) if metrics["step"] <= step]
        replace_file(path, b"".join(line + b"\n" for line in kept))
        return cls(run_dir, purge_step=step + 1)

    def write(self, step: int, *, kind: Kind, **values: Value) -> None:
        """Append one line; the numbers among `values` go to TensorBoard as `kind/name`.

        Args:
            step: updates done so far.
            kind: which set the values were measured on.
            values: numbers (of Python, or zero-dimensional arrays of any library), texts, and
                lists of samples. A value of None is left out.
        """
        plain = {name: _plain(value) for name, value in values.items() if value is not None}
        line = {"step": int(step), "kind": kind} | {
            name: _encoded(value) for name, value in plain.items()
        }
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8; its backslash form happens to be JSON's own escape.
        self._file.write(text.encode(errors="backslashreplace") + b"\n")
        self._file.flush()
        scalars = {
            f"{kind}/{name}": float(value)
            for name, value in plain.items()
            if isinstance(value, int | float)
        }
        self._events.add_scalars(int(step), scalars)

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `run_dir/metrics.jsonl` in the order in which they were written.

    Half a line at the end, left by a kill, is passed over.

    Raises:
        InputError: there is no metrics file, or a line of it is not a metrics line.
    """
    return [
        {name: _decoded(value) for name, value in metrics.items()}
        for _, metrics in _parse(Path(run_dir) / METRICS_FILE)
    ]


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` the new `content` in one move, so that no reader or kill sees half of it."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The complete lines of a metrics file, each as it stands and as JSON."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist: {path.parent} is not the directory of a run, "
            f"or its metrics were removed (an empty file stands for none)"
        ) from None
    lines = content.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics = json.loads(line)
        except ValueError:
            metrics = None
        if isinstance(metrics, dict) and isinstance(metrics.get("step"), int):
            parsed.append((line, metrics))
        elif number < len(lines):  # what follows the last newline is nothing, or half a line
            shown = line[:40].decode(errors="replace")
            raise InputError(
                f"{path}:{number}: {shown!r} is not a JSON object with a step: remove this line"
            )
    return parsed


def _plain(value: Any) -> Any:
    """A number as Python's own int or float; anything else as it is."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if hasattr(value, "__float__") else value


def _encoded(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decoded(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
