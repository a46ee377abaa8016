"""Timing for all benchmarks: contenders take turns, so that a busy machine slows all alike."""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

PAUSE = 0.02
"""Seconds of rest before each timed call: the worker threads of one framework spin for a while
after their last product and would take the cores from the next contender."""


class Timing(NamedTuple):
    """Seconds of one call."""

    best: float
    median: float
    cpu: float
    """Processor time of all threads, least of all rounds: says how much work was done, even on
    a machine that is busy with something else."""


Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float, float]:
    """The result, seconds of wall time, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


Contender = TypeVar("Contender")


def compare(
    contenders: dict[str, Contender],
    *,
    rounds: int = 10,
    warmup: int = 2,
    timer: Callable[[Contender], tuple[object, float, float]] = timed,
) -> dict[str, Timing]:
    """Call each contender once a round, after `warmup` calls of each that do not count.

    A contender returns when its result is there (JAX: `block_until_ready`). Contenders that are
    not called but timed elsewhere (see `processes`) bring the `timer`.
    """
    for contender in contenders.values():
        for _ in range(warmup):
            timer(contender)
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            time.sleep(PAUSE)
            _, wall_seconds, cpu_seconds = timer(contender)
            wall[name].append(wall_seconds)
            cpu[name].append(cpu_seconds)
    return {
        name: Timing(min(wall[name]), statistics.median(wall[name]), min(cpu[name]))
        for name in contenders
    }


def print_timings(title: str, timings: dict[str, Timing]) -> None:
    """One line a contender, in milliseconds."""
    rows = [
        (name, *(f"{1e3 * seconds:.1f}" for seconds in timing)) for name, timing in timings.items()
    ]
    print_table(title, ("", "min ms", "median ms", "cpu ms"), rows)


def print_table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table with its first column on the left and numbers on the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for first, *others in lines:
        numbers = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join((f"{first:<{widths[0]}}", *numbers)), flush=True)
