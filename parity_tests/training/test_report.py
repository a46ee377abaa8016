"""The report is one page that works offline, tells the truth, and is legible to everyone."""

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.training.metrics import MetricsWriter
from jax_transformer.training.report import write_report
from jax_transformer.training.report_charts import nice_ticks, smooth, thin
from jax_transformer.training.report_style import STYLE

HOSTILE = '</title></style></dd><script src="http://evil.example/x.js">&"\'<img src=//evil.example>'
_VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The page as a browser takes it: elements with attributes, and the text between."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self._open == [], "elements that are never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str, css_class: str = "") -> list[dict[str, str]]:
        wanted = set(css_class.split())
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and wanted <= set(attributes.get("class", "").split())
        ]


def _run(run_dir: Path, *, steps: int = 0, every: int = 1, evaluate_every: int = 0) -> Path:
    """A run directory with a loss that falls from about 8 to 2."""
    config = {"model": {"d_model": 192}, "training": {"steps": steps, "adam": {"b1": 0.9}}}
    (run_dir / "config.json").write_text(json.dumps(config))
    lines = []
    for step in range(every, steps + 1, every):
        loss = 2.0 + 6.0 * math.exp(-5.0 * step / steps)
        train = {"loss": loss, "learning_rate": 7e-4 * min(1.0, step / 100)}
        rates = {"tokens_per_second": 5000.0, "seconds": 0.1 * step}
        lines.append({"step": step, "kind": "train"} | train | rates)
        if evaluate_every and step % evaluate_every == 0:
            sample = {"source": "Open it.", "reference": "Öffnen Sie es."}
            scores = {"loss": loss + 0.1, "bleu": 20.0 * step / steps, "signature": "nrefs:1|tok"}
            samples = [sample | {"hypothesis": f"Öffnen {step}."}]
            lines.append({"step": step, "kind": "eval"} | scores | {"samples": samples})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    return run_dir


def _attention(run_dir: Path, **changes: Any) -> None:
    content = {
        "source_tokens": ["Open", " it", "<eos>"],
        "target_tokens": ["Öffnen", " es"],
        "weights": [[0.75, 0.25, 0.0], [0.125, 0.5, 0.375]],
        "layer": 2,
        "source": "Open it",
        "hypothesis": "Öffnen es",
    }
    (run_dir / "attention.json").write_text(json.dumps(content | changes))


def _points(path_data: str) -> list[list[tuple[float, float]]]:
    """The strokes of an SVG path that consists of M and L commands."""
    strokes = [stroke for stroke in path_data.split("M") if stroke]
    return [
        [(float(x), float(y)) for x, y in (point.split() for point in stroke.split("L"))]
        for stroke in strokes
    ]


@pytest.fixture
def full_page(tmp_path: Path) -> Page:
    run_dir = _run(tmp_path, steps=300, evaluate_every=50)
    with MetricsWriter.resume(run_dir, 300) as writer:
        writer.write(300, kind="test", bleu=19.25, signature="nrefs:1|tok")
    _attention(run_dir)
    return Page(write_report(run_dir))


def test_nothing_is_fetched_from_anywhere(full_page: Page) -> None:
    assert "://" not in full_page.source
    assert "url(" not in full_page.source
    assert "@import" not in full_page.source
    for tag, attributes in full_page.elements:
        assert tag not in {"script", "img", "iframe", "object", "embed", "use"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "xlink:href", "action"):
            assert attributes.get(name, "data:,") == "data:,"
    policies = [m["content"] for m in full_page.all("meta") if "http-equiv" in m]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_the_page_tells_the_run(full_page: Page) -> None:
    for text in ("Training report", "Loss", "nats per token", "BLEU", "Learning rate",
                 "\N{MULTIPLICATION SIGN}10⁻⁴ per update", "step", "held-out", "train, smoothed",
                 "19.2", "20.0",
                 "at step 300", "0:30", "5,000", "Open it.", "Öffnen Sie es.", "Öffnen 300.",
                 "nrefs:1|tok", "d_model", "192", "adam.b1", "0.9"):  # fmt: skip
        assert text in full_page.text


def test_the_page_can_be_heard(full_page: Page) -> None:
    assert full_page.all("html") == [{"lang": "en"}]
    assert len(full_page.all("h1")) == len(full_page.all("main")) == 1
    pictures = full_page.all("svg")
    assert len(pictures) == 4
    for picture in pictures:
        assert picture["role"] == "img"
        assert len(picture["aria-label"]) > 20
    labels = " ".join(picture["aria-label"] for picture in pictures)
    assert "held-out: 4.7" in labels
    assert "“Öffnen” to “Open”, “ es” to “ it”" in labels
    assert all("scope" in cell for cell in full_page.all("th"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(theme: str) -> None:
    light, dark = re.findall(r":root \{([^}]*)\}", STYLE)
    colors = dict(re.findall(r"--([a-z]+): #([0-9a-f]{6})", light if theme == "light" else dark))

    def luminance(name: str) -> float:
        channels = [int(colors[name][i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        a, b = sorted((luminance(one), luminance(other)), reverse=True)
        return (a + 0.05) / (b + 0.05)

    for ground in ("page", "card"):
        for text in ("ink", "quiet"):
            assert contrast(text, ground) >= 4.5  # WCAG 2.2, 1.4.3, level AA
        for mark in ("blue", "orange", "green", "heat", "bad"):
            assert contrast(mark, ground) >= 3.0  # WCAG 2.2, 1.4.11


def test_text_of_users_stays_text(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(
        json.dumps({HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}})
    )
    sample: dict[str, str] = dict.fromkeys(("source", "reference", "hypothesis"), HOSTILE)
    with MetricsWriter(run_dir) as writer:
        for step in (1, 2):
            writer.write(step, kind="train", loss=1.0, learning_rate=0.1)
            writer.write(step, kind="eval", loss=1.0, bleu=1.0, signature=HOSTILE, samples=[sample])
    _attention(run_dir, source_tokens=[HOSTILE] * 3, target_tokens=[HOSTILE, HOSTILE],
               source=HOSTILE, hypothesis=HOSTILE, layer=HOSTILE)  # fmt: skip
    page = Page(write_report(run_dir))  # which asserts that the elements are balanced
    assert not {"script", "img", "b"} & {tag for tag, _ in page.elements}
    assert page.text.count(HOSTILE) >= 9
    assert "<b>run" in page.text


def test_a_run_that_has_measured_nothing_has_a_page(tmp_path: Path) -> None:
    page = Page(write_report(_run(tmp_path)))
    assert "Nothing has been measured yet" in page.text
    assert "d_model" in page.text
    assert page.all("svg") == []


def test_a_single_point_is_a_dot_between_ticks(tmp_path: Path) -> None:
    page = Page(write_report(_run(tmp_path, steps=1)))
    (dot,) = page.all("path", "train dot")
    x, y = map(float, re.findall(r"[\d.]+", dot["d"])[:2])
    assert (x, y) == (1000.0, 500.0)
    assert len(page.all("span", "y-tick")) >= 6  # of the loss and the learning rate
    assert "held-out" not in page.text


def test_ten_thousand_points_make_a_small_page_with_the_same_curve(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, steps=100_000, every=10, evaluate_every=100)
    path = write_report(run_dir)
    assert path.stat().st_size < 250_000
    page = Page(path)
    (stroke,) = _points(page.all("path", "train faint")[0]["d"])
    assert len(stroke) <= 1600
    assert (stroke[0][0], stroke[-1][0]) == (0.1, 1000.0)
    assert 5 <= len(page.all("path", "held-out dot")) <= 120


def test_curves_go_down_when_the_loss_does(full_page: Page) -> None:
    (stroke,) = _points(full_page.all("path", "train faint")[0]["d"])
    assert all(b[0] > a[0] and b[1] > a[1] for a, b in itertools.pairwise(stroke))  # y is down
    assert stroke[0][1] < 100
    assert stroke[-1][1] > 900


def test_ticks_stand_where_their_values_are(full_page: Page) -> None:
    tops = [float(tick["style"][4:-1]) for tick in full_page.all("span", "y-tick")]
    texts = re.findall(r'class="y-tick"[^>]*>([^<]*)<', full_page.source)
    loss = dict(list(zip(texts, tops, strict=True))[: texts.index("8") + 1])  # the first chart
    # One unit of loss takes the same height everywhere, the greater value higher up.
    heights = {(a[1] - b[1]) / (float(b[0]) - float(a[0])) for a, b in
               itertools.pairwise(sorted(loss.items()))}  # fmt: skip
    assert max(heights) - min(heights) < 0.05  # percent, to the two digits that are written
    # The last held-out loss is 2 + 6 exp(-5) + 0.1; its dot must stand at that value.
    per_unit, (value, top) = heights.pop(), min(loss.items())
    last = full_page.all("path", "held-out dot")[5]["d"]
    y = float(re.findall(r"[\d.]+", last)[1]) / 10
    assert y == pytest.approx(top - (2.1 + 6 * math.exp(-5) - float(value)) * per_unit, abs=0.1)


def test_divergence_leaves_a_gap_and_is_said(tmp_path: Path) -> None:
    _run(tmp_path)
    with MetricsWriter.resume(tmp_path, 0) as writer:
        for step in range(1, 21):
            loss = math.nan if step in (8, 9) else math.inf if step == 10 else 3.0 - 0.1 * step
            writer.write(step, kind="train", loss=loss, learning_rate=math.nan)
        writer.write(20, kind="eval", loss=math.nan, bleu=0.0, signature="s")
    _attention(tmp_path, weights=[[math.nan] * 3, [math.inf, 0.5, 0.5]])
    page = Page(write_report(tmp_path))
    assert "3 of 20 train losses are not finite, the first at step 8." in page.text
    assert len(_points(page.all("path", "train faint")[0]["d"])) == 2
    for path in page.all("path"):
        assert not re.search("nan|inf", path["d"])
    assert len(page.all("rect", "invalid")) == 4


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(tmp_path: Path) -> None:
    _run(tmp_path)
    with MetricsWriter.resume(tmp_path, 0) as writer:
        for step, seconds in enumerate((10.0, 20.0, 30.0, 5.0, 15.0, 4.0), start=1):
            writer.write(step, kind="train", loss=1.0, seconds=seconds)
    assert "in 0:49" in Page(write_report(tmp_path)).text


def test_a_spike_does_not_flatten_the_curve(tmp_path: Path) -> None:
    _run(tmp_path)
    with MetricsWriter.resume(tmp_path, 0) as writer:
        for step in range(1, 1001):
            writer.write(step, kind="train", loss=1e6 if step == 500 else 4.0 - step / 500)
    page = Page(write_report(tmp_path))
    (stroke,) = _points(page.all("path", "train faint")[0]["d"])
    heights = [y for _, y in stroke]
    assert min(heights) == 0.0  # the spike ends at the top of the chart
    assert sorted(heights)[-10] - sorted(heights)[10] > 800


def test_cells_of_the_heat_map_are_their_weights(full_page: Page) -> None:
    cells = re.findall(
        r'<rect x="(\d+)" y="(\d+)"[^>]*fill-opacity="([\d.]+)"><title>([^<]*)</title>',
        full_page.source,
    )
    assert [(title, opacity) for _, _, opacity, title in cells] == [
        ("Öffnen → Open: 0.750", "1.00"),
        ("Öffnen →  it: 0.250", "0.33"),
        (" es → Open: 0.125", "0.17"),
        (" es →  it: 0.500", "0.67"),
        (" es → &lt;eos&gt;: 0.375", "0.50"),
    ]  # and none for the weight of 0
    columns, rows = ([int(cell[axis]) for cell in cells] for axis in (0, 1))
    assert columns[0] == columns[2] < columns[1] == columns[3] < columns[4]
    assert rows[0] == rows[1] < rows[2] == rows[4]
    labels = re.findall(r"<text [^>]*>([^<]*)</text>", full_page.source)
    assert labels == ["Öffnen", "es", "Open", "it", "&lt;eos&gt;"]
    assert "0.000.380.75" in full_page.text  # the scale, from 0 to the greatest weight


def test_labels_of_the_heat_map_are_readable(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, steps=3)
    tokens = [" ", "x" * 80, *(f" t{i}" for i in range(60))]
    _attention(run_dir, source_tokens=tokens, target_tokens=tokens[:2],
               weights=np.full((2, 62), 1 / 62).tolist())  # fmt: skip
    source = write_report(run_dir).read_text(encoding="utf-8")
    labels = re.findall(r"<text [^>]*>([^<]*)</text>", source)
    assert labels[0] == "␣"
    assert labels[1] == "x" * 17 + "…"
    columns = [
        float(x) for x in re.findall(r'class="column" transform="translate\(([\d.]+)', source)
    ]
    # Labels of 12 pixels, slanted by 50 degrees, do not touch from 12 / sin(50) pixels on.
    assert np.diff(columns).min() >= 12 / math.sin(math.radians(50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": [[0.5, 0.5], [0.5, 0.5]]}, r"shape \[2, 2\] for 2 target and 3 source tokens"),
        ({"weights": [[0.5, 0.5], [1.0]]}, "not rows of numbers of the same length"),
        ({"weights": [], "target_tokens": []}, "for 0 target"),
    ],
)
def test_attention_that_does_not_fit_is_refused_and_the_old_page_stays(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    page = write_report(_run(tmp_path, steps=3))
    before = page.read_bytes()
    _attention(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert page.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "object")],
)
def test_a_directory_without_a_config_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    MetricsWriter(tmp_path).close()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_an_interrupted_report_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_report(_run(tmp_path, steps=3))
    before = page.read_bytes()

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_report(tmp_path)
    assert page.read_bytes() == before
    write_report(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "report.html"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "whole", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (1.9, 8.6, False, [2, 4, 6, 8]),
        (0.0, 1.0, True, [0, 1]),
        (0.0, 3000.0, True, [0, 1000, 2000, 3000]),
        (-0.1, 0.4, False, [-0.1, 0.0, 0.1, 0.2, 0.3, 0.4]),
        (2.311, 2.313, False, [2.311, 2.3115, 2.312, 2.3125, 2.313]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, whole: bool, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 5, whole=whole) == pytest.approx(ticks, abs=1e-12)


def test_smoothing_keeps_lines_and_passes_over_gaps() -> None:
    line = 5.0 - 0.5 * np.arange(20, dtype=np.float64)
    # Exact to rounding where the window is symmetric: neither delayed nor bent at the start.
    np.testing.assert_allclose(smooth(line, 7)[:17], line[:17], rtol=1e-12)
    assert smooth(line, 7)[-1] == pytest.approx(line[-4:].mean())
    nan = math.nan
    gap = np.array([2.0, 4.0, nan, 6.0, math.inf, nan, nan, 1.0])
    np.testing.assert_allclose(smooth(gap, 5), [2, 3, nan, 5, nan, nan, nan, 1])


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    x = np.arange(10_000, dtype=np.float64)
    y = np.sin(x / 500)
    y[1234], y[8765], y[4000:4500] = 50.0, -50.0, math.nan
    thin_x, thin_y = thin(x, y, slices=100)
    assert thin_x.size <= 400
    assert (thin_x[0], thin_x[-1]) == (0.0, 9999.0)
    assert {1234.0, 8765.0} <= set(thin_x)
    assert np.isnan(thin_y[(thin_x >= 4000) & (thin_x < 4500)]).all()
    assert not np.isnan(thin_y[(thin_x < 4000) | (thin_x >= 4500)]).any()
    assert np.all(np.diff(thin_x) > 0)
    np.testing.assert_array_equal(thin(x[:50], y[:50], slices=100)[0], x[:50])
