"""The event file that TensorBoard reads, written at once."""

import importlib
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """One TensorBoard event file of scalars; what a call adds is out of this process after it.

    The messages and the checksum are those of tensorboardX. Its `SummaryWriter` is not used: it
    writes from a thread, up to two minutes late, which a killed run would lose, and waits for
    the disk at each flush.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        """Open a new event file in `directory`, which is made if it is missing.

        Args:
            directory: where TensorBoard looks; earlier event files in it stay.
            purge_step: the first step that is written anew after a resume. TensorBoard hides
                what earlier files hold of this step and the ones after it.
        """
        self._events, self._summaries, self._checksum = _tensorboardx()
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names. Two may be begun in one second.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self._file = (directory / name).open("xb", buffering=0)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            session_log = self._events.SessionLog
            self._write(step=purge_step, session_log=session_log(status=session_log.START))

    def add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one event that holds every `tag: value` of `scalars` at `step`."""
        summary = self._summaries.Summary()
        for tag, value in scalars.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(step=step, summary=summary)

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """Append one event as a TFRecord: its length and its bytes, each with a checksum."""
        event = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        checksums = (struct.pack("<I", self._checksum(part)) for part in (length, event))
        self._file.write(length + next(checksums) + event + next(checksums))


def _tensorboardx() -> tuple[Any, Any, Any]:
    """Two modules of messages and the checksum of tensorboardX, without letting it import torch.

    It imports torch wherever that is installed, to accept its tensors, which never come here:
    3 seconds and 200 MB of a run that has nothing to do with torch.
    """
    modules: dict[str, Any] = sys.modules
    hide = "torch" not in modules
    if hide:
        modules["torch"] = None  # makes `import torch` fail
    try:
        return (
            importlib.import_module("tensorboardX.proto.event_pb2"),
            importlib.import_module("tensorboardX.proto.summary_pb2"),
            importlib.import_module("tensorboardX.record_writer").masked_crc32c,
        )
    finally:
        if hide:
            del modules["torch"]
