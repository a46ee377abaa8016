"""What a person who watches a run sees: one live line, and a block for each evaluation."""

import contextlib
import math
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

# Rates are means over this much time, and over at least so many updates: long enough that
# batches of short and of long sentences average out, short enough to follow the machine.
WINDOW_SECONDS = 30.0
WINDOW_UPDATES = 20

# The first seconds say little about the rest.
_SECONDS_BEFORE_ESTIMATE = 2.0

# Where nothing can be redrawn, a line as often as this.
PLAIN_LINE_SECONDS = 10.0


class Score(NamedTuple):
    """How a number of an evaluation is shown."""

    label: str
    digits: int
    unit: str = ""
    higher_is_better: bool = False


SCORES = {
    "bleu": Score("BLEU", 1, "0 to 100", True),
    "bits_per_byte": Score("bits per byte", 3),
}
"""By their names in the metrics."""

# The label and the style of each text of a sample.
SAMPLE_LABELS = {
    "source": ("source", "dim"),
    "reference": ("reference", ""),
    "hypothesis": ("model", "bold cyan"),
    "prompt": ("prompt", "dim"),
    "continuation": ("model", "bold cyan"),
}

_MAX_WIDTH = 120
_MIN_BAR_WIDTH = 10
_MAX_LINES_OF_SAMPLE = 3


class RecentRate:
    """Tokens and steps per second of late, on a clock that stands still during pauses.

    rate = (count now - count then) / (seconds now - seconds then), where *then* is the start of
    the recent window.
    """

    def __init__(self, start_step: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_step = self._step = start_step
        self._steps = self._tokens = 0
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._skip = False  # leave out all that lies between the last update and the next
        self._recurring: dict[str, tuple[int, float, int]] = {}  # times, last seconds, last step
        self._marks = deque([(self._seconds(), 0, 0)])  # (seconds, steps, tokens)

    def update(self, step: int, tokens: int) -> None:
        """Note that `step` steps are done, with `tokens` tokens since the last update."""
        steps, self._step = step - self._step, step
        if self._paused_at is not None:
            return  # work done within a pause has no time of its own to be divided by
        now = self._seconds()
        if self._skip:
            self._skip = False
            self._paused_seconds += now - self._marks[-1][0]
            return
        self._steps += steps
        self._tokens += tokens
        self._marks.append((now, self._steps, self._tokens))
        while len(self._marks) > WINDOW_UPDATES + 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
            self._marks.popleft()

    @contextlib.contextmanager
    def pause(self, activity: str, *, recurs: bool) -> Generator[None, None, None]:
        """Stop the clock.

        With `recurs`, expect as much again in the steps to come. Without, as when a step compiles,
        nobody can say which part of it was work: that step is left out as a whole.
        """
        if self._paused_at is not None:  # the outer pause already accounts for this time
            yield
            return
        self._paused_at = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - self._paused_at
            self._paused_at = None
            self._paused_seconds += seconds
            self._skip |= not recurs
            # A pause before the first step does not tell after how many steps it comes again.
            if recurs and self._step > self._start_step:
                times = self._recurring[activity][0] if activity in self._recurring else 0
                self._recurring[activity] = (times + 1, seconds, self._step)

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the recent window; None before the first tokens."""
        seconds, _, tokens = self._window()
        return tokens / seconds if seconds > 0 and tokens else None

    def seconds_for(self, steps: int) -> float | None:
        """How long `steps` more take at the recent rate and with the usual pauses."""
        seconds, done, _ = self._window()
        if seconds < _SECONDS_BEFORE_ESTIMATE or not done:
            return None
        # The last evaluation is the best guess at the next: the first one compiles, and early
        # ones decode sentences that do not end. Spread over the steps up to it, not up to now:
        # the latter would shrink between two evaluations and jump at each.
        pauses = sum(
            times * last_seconds / (last_step - self._start_step)
            for times, last_seconds, last_step in self._recurring.values()
        )
        return steps * (seconds / done + pauses)

    def _seconds(self) -> float:
        return self._clock() - self._paused_seconds

    def _window(self) -> tuple[float, int, int]:
        first, last = self._marks[0], self._marks[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


class ProgressDisplay:
    """A context manager that shows how a training run goes.

    On a terminal: one live line (bar, step, loss, learning rate, tokens per second, time left)
    with evaluations printed above it. Elsewhere, in a log file or a pipe: a plain line every ten
    seconds and every evaluation in full, without escape codes.

        with ProgressDisplay(total_steps=3000) as display:
            with display.paused("compiling", recurs=False):
                ...
            display.update(10, loss=7.1, learning_rate=1e-4, tokens=20480)
            with display.paused("evaluating"):
                ...
            display.report_evaluation(10, 6.9, 0.4, signature, samples)
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total_steps: the step at which training ends.
            start_step: the step from which it starts, above 0 in a resumed run.
            quiet: show nothing; the rates are measured all the same.
            console: where to print; standard output by default.
            clock: seconds that only grow.
        """
        self._total_steps = total_steps
        self._step = start_step
        self._quiet = quiet
        self._console = console or _standard_output()
        self._clock = clock
        self._started = clock()
        self._rate = RecentRate(start_step, clock)
        self._latest: tuple[float, float] | None = None  # loss, learning rate
        self._activity: tuple[str, float] | None = None  # what a pause is for, since when
        self._live: Live | None = None
        self._next_plain_line = -math.inf
        self._over = False

    def __enter__(self) -> "ProgressDisplay":
        self._started = self._clock()
        self._rate = RecentRate(self._step, self._clock)
        if not self._quiet and self._console.is_interactive:
            self._live = Live(
                console=self._console, get_renderable=self._live_line, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        if self._live is not None:
            self._live.stop()  # draws the line a last time and gives the cursor back
        elif self._latest is not None:
            self._print_plain_line()

    @property
    def tokens_per_second(self) -> float | None:
        """Mean over the recent window, without pauses; None before the first tokens."""
        return self._rate.tokens_per_second

    @property
    def seconds_left(self) -> float | None:
        """At the recent rate and with the usual evaluations; None in the first seconds."""
        return self._rate.seconds_for(self._total_steps - self._step)

    def update(self, step: int, *, loss: float, learning_rate: float, tokens: int) -> None:
        """Show that `step` steps are done.

        Args:
            step: updates done so far. Call it when the numbers of that step have arrived: at its
                dispatch, the rates would be those of dispatching.
            loss: nats per token.
            learning_rate: of the last update.
            tokens: trained on since the last call. Within `paused` they do not count.
        """
        self._rate.update(step, tokens)
        self._step = step
        self._latest = (loss, learning_rate)
        if self._live is None and self._clock() >= self._next_plain_line:
            self._print_plain_line()

    @contextlib.contextmanager
    def paused(self, activity: str, *, recurs: bool = True) -> Generator[None, None, None]:
        """Show `activity` in the line and leave its time out of the rates.

        Args:
            activity: a word or two, such as "evaluating".
            recurs: whether the time left is to allow for more of it. False for compiling; the
                rates then leave out the step that compiles too, up to the next `update`.
        """
        before, self._activity = self._activity, (activity, self._clock())
        if self._live is None and not recurs:
            self.print(f"{activity} ...")  # may take a minute, in which a log would look dead
        try:
            with self._rate.pause(activity, recurs=recurs):
                yield
        finally:
            self._activity = before

    def print(self, message: str) -> None:
        """Print a line of text above the bar, as it stands."""
        self._print(Text(self._printable(message)))

    def report_evaluation(
        self,
        step: int,
        loss: float,
        numbers: Mapping[str, float | str],
        samples: Sequence[Mapping[str, str]],
    ) -> None:
        """Print an evaluation above the bar.

        Args:
            step: updates done so far.
            loss: on the held-out set, nats per token.
            numbers: others on it by their names in the metrics, and a `signature` that says how
                they were computed.
            samples: texts, each `{"source", "reference", "hypothesis"}` of a translation or
                `{"prompt", "continuation"}`.
        """
        scores = Text.assemble(("held-out loss ", "dim"), (f"{loss:.3f}", "bold"))
        for name, value in numbers.items():
            if name in SCORES:
                scores.append(f"  {SCORES[name].label} ", "dim")
                scores.append(f"{value:.{SCORES[name].digits}f}", "bold green")
        signature = str(numbers.get("signature", ""))
        if self._live is not None:
            self._print(self._evaluation_block(step, scores, signature, samples))
            return
        self._print(Text(f"step {step:,}  ") + scores + Text(f"  {signature}".rstrip()))
        for label, text, _ in _rows(samples):
            self._print(Text(f"  {label:<9}  {self._printable(text)}"))

    def _evaluation_block(
        self, step: int, scores: Text, signature: str, samples: Sequence[Mapping[str, str]]
    ) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        longest = _MAX_LINES_OF_SAMPLE * (self._width - 20)  # lines end at words, not at the edge
        for label, text, style in _rows(samples):
            table.add_row(f"  {label}", Text(self._printable(_cut(text, longest)), style=style))
        rule = Rule(Text(f"step {step:,}", style="bold"), align="left", style="dim")
        fits = len(scores) + 2 + len(signature) <= self._width
        if signature:
            scores = scores + Text(("  " if fits else "\n") + signature, style="dim")
        return Constrain(Group(rule, scores, table), self._width)

    def _live_line(self) -> RenderableType:
        """The bar, and as many fields as the width allows; the last ones are dropped first."""
        total = f"{self._total_steps:,}"
        ends = (f"{self._step:,}".rjust(len(total)) + "/" + total, self._time().rjust(9))
        fields = self._fields()
        while fields and _MIN_BAR_WIDTH + sum(len(x) + 2 for x in (*ends, *fields)) > self._width:
            fields.pop()
        style = "" if self._latest is None or math.isfinite(self._latest[0]) else "bold red"
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        line.add_column(ratio=1)
        for _ in range(len(fields) + 2):
            line.add_column(no_wrap=True)
        line.add_row(
            ProgressBar(total=max(self._total_steps, 1), completed=self._step),
            Text(ends[0], style="bold"),
            *(Text(field, style=style) for field in fields),
            Text(ends[1], style="cyan"),
        )
        return Constrain(line, self._width)

    def _print_plain_line(self) -> None:
        self._next_plain_line = self._clock() + PLAIN_LINE_SECONDS
        fields = (f"step {self._step:,}/{self._total_steps:,}", *self._fields(), self._time())
        self._print(Text("  ".join(field for field in fields if field)))

    def _fields(self) -> list[str]:
        if self._activity is not None and not self._over:
            activity, since = self._activity
            return [f"{activity}, {self._clock() - since:.0f} s"]
        if self._latest is None:
            return []
        loss, learning_rate = self._latest
        fields = [f"loss {loss:.3f}", f"lr {learning_rate:.2e}"]
        if self.tokens_per_second is not None:
            fields.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return fields

    def _time(self) -> str:
        if self._over:
            return f"in {format_seconds(self._clock() - self._started)}"
        if self.seconds_left is None:
            return ""
        # Nobody plans by the second what is minutes away, and the last digit would flicker.
        coarse = 5 if self.seconds_left > 120 else 1
        return f"{format_seconds(coarse * round(self.seconds_left / coarse))} left"

    @property
    def _width(self) -> int:
        # The last column stays free: some terminals wrap as soon as it is written.
        return min(self._console.width - 1, _MAX_WIDTH)

    def _print(self, renderable: RenderableType) -> None:
        if not self._quiet:
            # Only a live display wraps lines; a log file has no width to wrap at.
            self._console.print(renderable, soft_wrap=self._live is None)

    def _printable(self, text: str) -> str:
        """`text` without what would move the cursor or what the output's encoding lacks."""
        visible = "".join(
            character if unicodedata.category(character) != "Cc" else " " for character in text
        )
        encoding = self._console.encoding
        return visible.encode(encoding, errors="replace").decode(encoding)


def format_seconds(seconds: float) -> str:
    """A duration as people write it: `4:32`, `1:04:32`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rows(samples: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Label, text and style of each line of the samples."""
    for sample in samples:
        for name, text in sample.items():
            label, style = SAMPLE_LABELS[name]
            yield label, text, style


def _cut(text: str, cells: int) -> str:
    """At most `cells` columns of `text`; an ellipsis says that there was more."""
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def _standard_output() -> Console:
    # rich takes FORCE_COLOR for a terminal, but a log file cannot be redrawn in colour either.
    interactive = None if sys.stdout.isatty() else False
    return Console(highlight=False, force_interactive=interactive)
