"""Metrics survive what happens to runs: kills, resumes, divergence."""

import importlib
import json
import math
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.training.metrics import MetricsWriter, read_metrics

# The definition of TensorBoard's events. Its module is generated and has no types.
event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")


def _events(run_dir: Path) -> list[list[Any]]:
    """The events of each event file, in the order in which TensorBoard reads the files."""
    files = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        content, events = path.read_bytes(), []
        while content:  # a record: length, its checksum (4 bytes), data, its checksum (4 bytes)
            (length,) = struct.unpack("<Q", content[:8])
            events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
        files.append(events)
    return files


def _scalars(events: list[Any]) -> list[tuple[int, str, float]]:
    return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]


def _write_steps(writer: MetricsWriter, first: int, last: int, offset: float = 0.0) -> None:
    for step in range(first, last + 1):
        writer.write(step, kind="train", loss=step + offset)


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and the output of a process that was killed right after a write."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    program = f"""
import os, signal, sys
from jax_transformer.training.metrics import MetricsWriter
writer = MetricsWriter({str(run_dir)!r})
for step in (1, 2, 3):
    writer.write(step, kind="train", loss=0.5 * step)
print("torch" in sys.modules, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return run_dir, done.stdout.strip()


def test_a_killed_run_keeps_every_line_and_event(killed_run: tuple[Path, str]) -> None:
    run_dir, _ = killed_run
    assert [(line["step"], line["loss"]) for line in read_metrics(run_dir)] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
    ]
    (events,) = _events(run_dir)
    assert _scalars(events) == [(1, "train/loss", 0.5), (2, "train/loss", 1.0),
                                (3, "train/loss", 1.5)]  # fmt: skip


def test_writing_metrics_does_not_import_torch(killed_run: tuple[Path, str]) -> None:
    assert killed_run[1] == "False"


def test_values_are_plain_json_numbers_texts_and_samples(tmp_path: Path) -> None:
    sample = {"source": "a\u2028b", "reference": "Öl <eos>", "hypothesis": "\udc80"}
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            7,
            kind="eval",
            loss=np.float32(0.1),
            tokens=np.int64(12),
            rate=np.array(2.5),
            bleu=None,
            signature="nrefs:1",
            samples=[sample],
        )
    line = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert line == {
        "step": 7,
        "kind": "eval",
        "loss": float(np.float32(0.1)),
        "tokens": 12,
        "rate": 2.5,
        "signature": "nrefs:1",
        "samples": [sample],
    }
    assert read_metrics(tmp_path) == [line]


def test_numbers_that_json_lacks_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, kind="train", loss=math.nan, gradient_norm=math.inf, low=-math.inf)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] == "NaN"
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["loss"])
    assert (line["gradient_norm"], line["low"]) == (math.inf, -math.inf)


def test_a_line_that_would_not_be_json_is_refused_whole(tmp_path: Path) -> None:
    sample: Any = {"source": "a", "score": math.nan}
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="JSON compliant"):
            writer.write(1, kind="eval", samples=[sample])
        _write_steps(writer, 2, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 9)
    with MetricsWriter.resume(tmp_path, 6) as writer:  # the checkpoint is older than the kill
        _write_steps(writer, 7, 10, offset=100.0)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["loss"] for line in lines[5:8]] == [6.0, 107.0, 108.0]


def test_tensorboard_is_told_to_hide_what_is_written_anew(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 9)
    with MetricsWriter.resume(tmp_path, 6) as writer:  # within the same second: two files still
        _write_steps(writer, 7, 8, offset=100.0)
    first, second = _events(tmp_path)
    assert [step for step, _, _ in _scalars(first)] == list(range(1, 10))
    starts = [e.step for e in second if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [7]
    assert _scalars(second) == [(7, "train/loss", 107.0), (8, "train/loss", 108.0)]
    assert all(event.file_version == "brain.Event:2" for event in (first[0], second[0]))


def test_half_a_line_at_the_end_is_dropped(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 2)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "kind": "train", "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    MetricsWriter.resume(tmp_path, 5).close()
    assert path.read_bytes() == whole


def test_a_whole_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    with MetricsWriter.resume(tmp_path, 2) as writer:
        _write_steps(writer, 3, 3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_resume_that_is_interrupted_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 9)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter.resume(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("broken", [b"nonsense", b'{"kind": "train"}', b"[1]", b'{"step": \xff}'])
def test_a_broken_line_is_named_and_nothing_is_changed(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1, "kind": "train"}\n' + broken + b'\n{"step": 2, "kind": "train"}\n'
    path.write_bytes(content)
    for read in (read_metrics, lambda run_dir: MetricsWriter.resume(run_dir, 1)):
        with pytest.raises(InputError, match=r"metrics\.jsonl:2: ") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_new_run_refuses_a_directory_that_has_metrics(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        _write_steps(writer, 1, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="already holds the metrics of a run"):
        MetricsWriter(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    for read in (read_metrics, lambda run_dir: MetricsWriter.resume(run_dir, 1)):
        with pytest.raises(InputError, match="does not exist"):
            read(tmp_path)
    assert list(tmp_path.iterdir()) == []
