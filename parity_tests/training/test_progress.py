"""Rates and estimates are honest, and every output device gets what it can show."""

import io
import itertools
import math
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from jax_transformer.training.progress import ProgressDisplay, RecentRate, format_seconds

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1"
SAMPLE = {"source": "Open it.", "reference": "Öffnen Sie es.", "hypothesis": "Öffnen Sie."}


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _log_file() -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=False, highlight=False)


def _terminal(width: int = 80) -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=True, width=width, highlight=False)


def _visible(output: str) -> list[str]:
    """The lines that stand on a terminal after `output`, without colours."""
    output = re.sub(r"\x1b\[\?25[lh]", "", output)
    lines = [""]
    for part in re.split(r"(\r|\n|\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m)", output):
        if part == "\n":
            lines.append("")
        elif part in ("\r", "\x1b[2K"):
            lines[-1] = ""
        elif part == "\x1b[1A":
            lines.pop()
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_the_rate_is_that_of_the_recent_window(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    for step in range(1, 601):
        clock.now += 0.1 if step <= 300 else 0.5  # the machine slows down
        rate.update(step, tokens=100)
    assert rate.tokens_per_second == pytest.approx(200.0)
    assert rate.seconds_for(10) == pytest.approx(5.0)


def test_pauses_do_not_lower_the_rate(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    with rate.pause("compiling", recurs=False):
        clock.now += 60.0
    for step in range(1, 41):
        clock.now += 0.5
        rate.update(step, tokens=100)
        if step % 10 == 0:
            with rate.pause("evaluating", recurs=True):
                clock.now += 7.0
    assert rate.tokens_per_second == pytest.approx(200.0)


def test_pauses_within_a_pause_count_once(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    clock.now += 5.0
    rate.update(1, tokens=100)
    with rate.pause("evaluating", recurs=True):
        clock.now += 3.0
        with rate.pause("saving", recurs=True):
            clock.now += 4.0
    clock.now += 5.0
    rate.update(2, tokens=100)
    assert rate.tokens_per_second == pytest.approx(20.0)


def test_a_step_done_within_a_pause_does_not_raise_the_rate(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    with rate.pause("compiling", recurs=False):
        clock.now += 60.0
        rate.update(1, tokens=1_000_000)
    for step in range(2, 12):
        clock.now += 1.0
        rate.update(step, tokens=100)
    assert rate.tokens_per_second == pytest.approx(100.0)
    assert rate.seconds_for(5) == pytest.approx(5.0)


def test_the_time_left_is_right_and_steady(clock: Clock) -> None:
    total, step_seconds = 1000, (0.05, 0.15)  # batches of short and of long sentences
    estimates = []
    with ProgressDisplay(total, quiet=True, clock=clock) as display:
        with display.paused("compiling", recurs=False):
            clock.now += 40.0
        for step in range(1, total + 1):
            clock.now += step_seconds[step % 7 > 3]
            display.update(step, loss=1.0, learning_rate=1e-3, tokens=100)
            estimates.append((clock.now, display.seconds_left))
            if step % 100 == 0 and step < total:
                with display.paused("evaluating"):
                    clock.now += 5.0
    end = clock.now
    assert estimates[0][1] is None  # one step tells nothing yet
    # From the first evaluation on, the estimate knows their cost. Left are the batches at hand
    # (a few steps of the window) and whether the next evaluation is near or far: one of 5 s.
    for now, left in estimates[100:]:
        assert left == pytest.approx(end - now, rel=0.05, abs=6.0)
    lefts = [left for _, left in estimates[100:] if left is not None]
    changes = [b - a for a, b in itertools.pairwise(lefts)]
    assert max(map(abs, changes)) < 2.0  # no jump that a person would wonder at


def test_a_step_that_compiles_is_left_out_as_a_whole(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    for step in range(1, 13):
        if step in (1, 2, 5):  # batches of a new shape: the first step with each compiles
            with rate.pause("compiling", recurs=False):
                clock.now += 20.0
        else:
            clock.now += 1.0
        rate.update(step, tokens=100)
    assert rate.tokens_per_second == pytest.approx(100.0)
    assert rate.seconds_for(5) == pytest.approx(5.0)


def test_a_first_evaluation_that_compiles_is_soon_forgotten(clock: Clock) -> None:
    rate = RecentRate(0, clock)
    for step in range(1, 31):
        clock.now += 1.0
        rate.update(step, tokens=100)
        if step % 10 == 0:
            with rate.pause("evaluating", recurs=True):
                clock.now += 100.0 if step == 10 else 5.0
        if step == 20:
            assert rate.seconds_for(100) == pytest.approx(150.0)
    assert rate.seconds_for(100) == pytest.approx(150.0)


def test_an_evaluation_before_the_first_step_is_not_taken_for_the_usual_rate(clock: Clock) -> None:
    rate = RecentRate(500, clock)
    with rate.pause("evaluating", recurs=True):
        clock.now += 60.0
    for step in range(501, 511):
        clock.now += 1.0
        rate.update(step, tokens=50)
    assert rate.seconds_for(5) == pytest.approx(5.0)


def test_a_resumed_run_is_timed_by_its_own_steps(clock: Clock) -> None:
    with ProgressDisplay(1000, 900, quiet=True, clock=clock) as display:
        for step in range(901, 911):
            clock.now += 1.0
            display.update(step, loss=1.0, learning_rate=1e-3, tokens=50)
        assert display.seconds_left == pytest.approx(90.0)
        assert display.tokens_per_second == pytest.approx(50.0)


def test_a_log_file_gets_whole_lines_without_escape_codes(clock: Clock) -> None:
    file, console = _log_file()
    long = {"source": "word " * 60, "reference": "[bold]x[/bold]", "hypothesis": "y" * 300}
    with ProgressDisplay(100, console=console, clock=clock) as display:
        for step in range(1, 101):
            clock.now += 1.0
            display.update(step, loss=2.5, learning_rate=1e-3, tokens=100)
            if step == 50:
                display.report_evaluation(
                    step, 2.9, {"bleu": 14.23, "signature": SIGNATURE}, [SAMPLE, long]
                )
    output = file.getvalue()
    assert "\x1b" not in output
    assert "\r" not in output
    lines = output.splitlines()
    assert f"step 50  held-out loss 2.900  BLEU 14.2  {SIGNATURE}" in lines
    assert "  source     Open it." in lines
    assert "  reference  Öffnen Sie es." in lines
    assert "  reference  [bold]x[/bold]" in lines
    assert "  model      " + "y" * 300 in lines
    progress = [line for line in lines if line.startswith("step") and "lr" in line]
    assert 10 <= len(progress) <= 12  # 100 seconds, a line every ten
    assert progress[5] == "step 51/100  loss 2.500  lr 1.00e-03  100 tokens/s  0:49 left"
    assert progress[-1] == "step 100/100  loss 2.500  lr 1.00e-03  100 tokens/s  in 1:40"


def test_quiet_prints_nothing_and_still_measures(clock: Clock) -> None:
    for file, console in (_log_file(), _terminal()):
        with ProgressDisplay(10, quiet=True, console=console, clock=clock) as display:
            with display.paused("compiling", recurs=False):
                clock.now += 5.0
            display.update(1, loss=2.5, learning_rate=1e-3, tokens=100)
            clock.now += 2.0
            display.update(2, loss=2.5, learning_rate=1e-3, tokens=100)
            display.report_evaluation(1, 2.9, {"bleu": 14.2, "signature": SIGNATURE}, [SAMPLE])
            display.print("saved")
            assert display.tokens_per_second == pytest.approx(50.0)
        assert file.getvalue() == ""


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 250])
def test_the_live_line_fits_the_terminal(clock: Clock, width: int) -> None:
    file, console = _terminal(width)
    with ProgressDisplay(300_000, console=console, clock=clock) as display:
        clock.now += 20.0
        display.update(123_456, loss=2.5, learning_rate=1e-3, tokens=100_000)
    (line,) = _visible(file.getvalue())
    assert cell_len(line) < width
    assert "123,456/300,000" in line
    assert "in 0:20" in line
    if width >= 80:
        assert "loss 2.500  lr 1.00e-03  5,000 tokens/s" in line


def test_evaluations_stand_above_the_live_line(clock: Clock) -> None:
    file, console = _terminal(60)
    long = {"source": "word " * 200, "reference": "[bold]x[/bold]", "hypothesis": ""}
    with ProgressDisplay(10, console=console, clock=clock) as display:
        display.update(5, loss=2.5, learning_rate=1e-3, tokens=100)
        display.report_evaluation(5, 2.9, {"bleu": 14.23, "signature": SIGNATURE}, [SAMPLE, long])
    lines = _visible(file.getvalue())
    assert lines[0].startswith("step 5 ─")
    assert lines[1:6] == [
        "held-out loss 2.900  BLEU 14.2",
        SIGNATURE,
        "  source     Open it.",
        "  reference  Öffnen Sie es.",
        "  model      Öffnen Sie.",
    ]
    assert "5/10" in lines[-1]
    assert "  reference  [bold]x[/bold]" in lines
    assert sum("word" in line for line in lines) <= 4  # cut, and said to be
    assert "…" in "".join(lines)
    assert all(cell_len(line) < 60 for line in lines)


def test_texts_cannot_move_the_cursor(clock: Clock) -> None:
    hostile = {"source": "a\x1b[2Jb\rc\nd\x07", "reference": "x", "hypothesis": "y"}
    for file, console in (_log_file(), _terminal()):
        with ProgressDisplay(10, console=console, clock=clock) as display:
            display.report_evaluation(5, 2.9, {"bleu": 14.23, "signature": SIGNATURE}, [hostile])
        assert any("a [2Jb c d" in line for line in _visible(file.getvalue()))
        assert "\x1b[2J" not in file.getvalue()


def test_a_character_that_the_output_lacks_does_not_end_the_run(clock: Clock) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    for console in (
        Console(file=file, force_terminal=False),
        Console(file=file, force_terminal=True, width=40),
    ):
        with ProgressDisplay(10, console=console, clock=clock) as display:
            long = dict(SAMPLE, source="Ö " * 100)
            display.report_evaluation(
                5, 2.9, {"bleu": 14.2, "signature": SIGNATURE}, [SAMPLE, long]
            )
    file.flush()
    assert b"?ffnen Sie es." in raw.getvalue()


def test_divergence_is_shown(clock: Clock) -> None:
    for file, console in (_log_file(), _terminal()):
        with ProgressDisplay(10, console=console, clock=clock) as display:
            display.update(5, loss=math.nan, learning_rate=1e-3, tokens=100)
        assert "loss nan" in _visible(file.getvalue())[-1]


def test_an_exception_gives_the_cursor_back_and_passes_on(clock: Clock) -> None:
    file, console = _terminal()
    display = ProgressDisplay(10, console=console, clock=clock)
    with pytest.raises(KeyboardInterrupt), display, display.paused("evaluating"):
        raise KeyboardInterrupt
    output = file.getvalue()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (272, "4:32"), (3599.9, "1:00:00"),
     (3872, "1:04:32"), (100_000, "27:46:40")],
)  # fmt: skip
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
