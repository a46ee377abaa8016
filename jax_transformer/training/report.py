"""One page that tells how a run went, readable anywhere: no network, no scripts."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_transformer.errors import InputError
from jax_transformer.training.metrics import read_metrics, replace_file
from jax_transformer.training.progress import SAMPLE_LABELS, SCORES, format_seconds
from jax_transformer.training.report_charts import Curve, heat_map, line_chart, smooth
from jax_transformer.training.report_style import STYLE

REPORT_FILE = "report.html"
CONFIG_FILE = "config.json"
ATTENTION_FILE = "attention.json"

# Rows in the table of one sample over the run.
_MAX_STAGES = 12

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Metrics = dict[str, Any]


def write_report(run_dir: str | Path) -> Path:
    """Write `run_dir/report.html` from what the run has recorded so far; returns its path.

    Reads `config.json` (an object; each of its own objects becomes a table of settings),
    `metrics.jsonl` (see `MetricsWriter`) and, where it exists, `attention.json`: one
    sentence's cross-attention,

        {"source": str, "hypothesis": str, "source_tokens": [S texts],
         "target_tokens": [T texts], "weights": [T lists of S numbers], "layer": int}

    with the weights averaged over the heads, the row of a target token being where the decoder
    looked when it wrote that token, and the layer counted from 1.

    The page is replaced in one move, so that a reader never sees half of it.

    Raises:
        InputError: `config.json` or `metrics.jsonl` is missing, or a file is not as above.
    """
    run_dir = Path(run_dir)
    config = _read_object(run_dir / CONFIG_FILE)
    metrics = read_metrics(run_dir)
    attention_path = run_dir / ATTENTION_FILE
    attention = _read_object(attention_path) if attention_path.exists() else None
    sections = [
        _header(run_dir.resolve().name, metrics),
        "<main>",
        _curves(metrics),
        _samples(metrics),
        _attention(attention, attention_path) if attention is not None else "",
        _evaluations(metrics),
        _settings(config),
        "</main>",
    ]
    page = _page(f"{run_dir.resolve().name}: training report", "\n".join(filter(None, sections)))
    path = run_dir / REPORT_FILE
    replace_file(path, page.encode(errors="xmlcharrefreplace"))
    return path


def _page(title: str, body: str) -> str:
    # The policy forbids every request, whatever text a corpus or a model smuggles in; the empty
    # icon keeps browsers from asking a server for one.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _header(name: str, metrics: Sequence[Metrics]) -> str:
    tiles = "".join(
        f"<div><dt>{label}</dt><dd><strong>{value}</strong><small>{note}</small></dd></div>"
        for label, value, note in _tiles(metrics)
    )
    return f"""<header>
<h1>Training report</h1>
<p class="quiet"><code>{escape(name)}</code></p>
<dl class="tiles">{tiles}</dl>
</header>"""


def _tiles(metrics: Sequence[Metrics]) -> list[tuple[str, str, str]]:
    """The run in a few numbers: label, value, note."""
    tiles = []
    for name, score in SCORES.items():
        steps, values = _series(metrics, "test", name)
        if values.size:
            value = f"{values[-1]:.{score.digits}f}"
            tiles.append((f"Test {score.label}", value, f"at step {steps[-1]:,.0f}"))
        steps, values = _series(metrics, "eval", name)
        if values.size:
            if score.higher_is_better:
                best = np.argmax(np.nan_to_num(values, nan=-1.0))
            else:
                best = np.argmin(np.nan_to_num(values, nan=math.inf))
            note = _note_of_best(steps, values, best, digits=score.digits)
            tiles.append((f"Held-out {score.label}", f"{values[-1]:.{score.digits}f}", note))
    steps, loss = _series(metrics, "eval", "loss")
    if loss.size:
        note = _note_of_best(steps, loss, np.argmin(np.nan_to_num(loss, nan=math.inf)), digits=3)
        tiles.append(("Held-out loss", f"{loss[-1]:.3f}", note))
    _, loss = _series(metrics, "train", "loss")
    if loss.size:
        recent = smooth(loss, _window(loss))[-1]
        tiles.append(("Train loss", f"{recent:.3f}", "recent mean"))
    _, seconds = _series(metrics, "train", "seconds")
    if metrics:
        restarts = seconds[:-1][np.diff(seconds) < 0]  # each resume counts from 0 again
        note = f"in {format_seconds(seconds[-1] + restarts.sum())}" if seconds.size else ""
        tiles.append(("Steps", f"{max(line['step'] for line in metrics):,}", note))
    _, rates = _series(metrics, "train", "tokens_per_second")
    if rates.size:
        tiles.append(("Tokens/s", f"{np.median(rates):,.0f}", "median"))
    return tiles


def _note_of_best(
    steps: NDArray[np.float64], values: NDArray[np.float64], best: np.intp, *, digits: int
) -> str:
    if not np.isfinite(values[best]):
        return "never finite"
    if best == values.size - 1:
        return "the best so far" if best else f"at step {steps[-1]:,.0f}"
    return f"best {values[best]:.{digits}f} at step {steps[best]:,.0f}"


def _curves(metrics: Sequence[Metrics]) -> str:
    train_steps, train = _series(metrics, "train", "loss")
    held_out_steps, held_out = _series(metrics, "eval", "loss")
    if not train.size and not held_out.size:
        return '<h2>Curves</h2>\n<p class="card quiet">Nothing has been measured yet.</p>'
    several = train.size > 2  # a mean of one or two values would only cover them
    curves = [
        Curve(
            label="train", steps=train_steps, values=train, color="train",
            style="faint" if several else "bold",
        ),
        Curve(
            label="train, smoothed", steps=train_steps if several else np.empty(0),
            values=smooth(train, _window(train)) if several else np.empty(0),
            color="train", style="bold",
        ),
        Curve(
            label="held-out", steps=held_out_steps, values=held_out, color="held-out", style="dots"
        ),
    ]  # fmt: skip
    parts = ["<h2>Curves</h2>", _note_on_divergence(train_steps, train)]
    parts.append(line_chart("Loss", "nats per token", curves, digits=3))
    pair = []
    for name, score in SCORES.items():
        steps, values = _series(metrics, "eval", name)
        if values.size:
            curve = Curve(
                label="held-out", steps=steps, values=values, color="held-out", style="dots"
            )
            from_zero = score.higher_is_better
            title = score.label[0].upper() + score.label[1:]
            pair.append(
                line_chart(title, score.unit, [curve], from_zero=from_zero, digits=score.digits)
            )
    steps, rate = _series(metrics, "train", "learning_rate")
    if rate.size:
        # Rates of 0.0001 and the like are read more easily with their power of ten taken out.
        greatest = np.max(np.abs(np.nan_to_num(rate)))
        power = math.floor(math.log10(greatest)) if greatest > 0 else 0
        unit = (
            f"\N{MULTIPLICATION SIGN}10{str(power).translate(_SUPERSCRIPTS)} per update"
            if power
            else "per update"
        )
        curve = Curve(
            label="schedule", steps=steps, values=rate / 10.0**power, color="rate", style="bold"
        )
        pair.append(line_chart("Learning rate", unit, [curve], from_zero=True))
    parts.append(f'<div class="pair">{"".join(pair)}</div>')
    return "\n".join(filter(None, parts))


def _note_on_divergence(steps: NDArray[np.float64], loss: NDArray[np.float64]) -> str:
    lost = ~np.isfinite(loss)
    if not lost.any():
        return ""
    return (
        f'<p class="note">{lost.sum():,} of {loss.size:,} train losses are not finite, '
        f"the first at step {steps[lost.argmax()]:,.0f}.</p>"
    )


def _samples(metrics: Sequence[Metrics]) -> str:
    evaluations = [line for line in metrics if line.get("kind") == "eval" and line.get("samples")]
    if not evaluations:
        return ""
    latest = evaluations[-1]
    cards = "".join(f'<div class="card">{_sample(sample)}</div>' for sample in latest["samples"])
    title = "Sample translations" if "source" in latest["samples"][0] else "Sample text"
    return f"""<h2>{title} <span class="quiet">at step {latest["step"]:,}</span></h2>
{cards}{_stages(evaluations)}"""


def _sample(sample: Mapping[str, str]) -> str:
    """The texts of a sample, each with what it is."""
    rows = ""
    for name, text in sample.items():
        label, _ = SAMPLE_LABELS[name]
        kind = f' class="{label} {name}"' if label == "model" else ""
        rows += f'<dt>{label}</dt><dd dir="auto"{kind}>{_text(text)}</dd>\n'
    return f'<dl class="samples">\n{rows}</dl>'


def _stages(evaluations: Sequence[Metrics]) -> str:
    """What the model made of the first sample in the course of training."""
    first, *_, written = evaluations[-1]["samples"][0]
    given = evaluations[-1]["samples"][0][first]
    stages = [
        (line["step"], sample[written])
        for line in evaluations
        for sample in line["samples"]
        if sample.get(first) == given
    ]
    if len(stages) < 2:
        return ""
    shown = np.unique(np.linspace(0, len(stages) - 1, _MAX_STAGES).round().astype(int))
    rows = "".join(
        f'<tr><th scope="row" class="number">{stages[i][0]:,}</th>'
        f'<td dir="auto" class="{written}">{_text(stages[i][1])}</td></tr>'
        for i in shown
    )
    return f"""<details><summary>The first of them in the course of training</summary>
<table><thead><tr><th scope="col" class="number">step</th><th scope="col">model</th></tr></thead>
<tbody>{rows}</tbody></table></details>"""


def _attention(attention: Metrics, path: Path) -> str:
    try:
        sources = [str(token) for token in attention["source_tokens"]]
        targets = [str(token) for token in attention["target_tokens"]]
        weights = np.array(attention["weights"], dtype=np.float64)
        layer, source, hypothesis = (attention[x] for x in ("layer", "source", "hypothesis"))
    except KeyError as error:
        raise InputError(f"{path}: key {error} is missing") from None
    except (TypeError, ValueError):
        raise InputError(f"{path}: weights are not rows of numbers of the same length") from None
    if weights.shape != (len(targets), len(sources)) or not weights.size:
        raise InputError(
            f"{path}: weights of shape {list(weights.shape)} for {len(targets)} target and "
            f"{len(sources)} source tokens: give one row for each target token, one column for "
            f"each source token"
        )
    strongest = [int(column) for column in np.nan_to_num(weights).argmax(axis=1)]
    description = "Each token of the translation and the source token it attended to most: "
    description += ", ".join(
        f"“{target}” to “{sources[column]}”"
        for target, column in zip(targets, strongest, strict=True)
    )
    return f"""<h2>Cross-attention <span class="quiet">of decoder layer {_text(layer)}</span></h2>
<div class="card">
<dl class="samples"><dt>source</dt><dd dir="auto">{_text(source)}</dd>
<dt>model</dt><dd dir="auto" class="model">{_text(hypothesis)}</dd></dl>
<p class="quiet">A row for each token that the model wrote, a column for each source token. The
stronger the colour, the more the decoder looked at the source token when it wrote the row's token
(mean over the heads).</p>
{heat_map(targets, sources, weights, description=description)}
</div>"""


def _evaluations(metrics: Sequence[Metrics]) -> str:
    lines = [line for line in metrics if line.get("kind") in ("eval", "test")]
    if not lines:
        return ""
    names = {"eval": "held-out", "test": "test"}
    scores = {name: SCORES[name] for name in SCORES if any(name in line for line in lines)}
    rows = "".join(
        f'<tr><th scope="row" class="number">{line["step"]:,}</th><td>{names[line["kind"]]}</td>'
        f'<td class="number">{_number(line.get("loss"), 3)}</td>'
        + "".join(
            f'<td class="number">{_number(line.get(name), score.digits)}</td>'
            for name, score in scores.items()
        )
        + "</tr>"
        for line in lines
    )
    signatures = sorted({str(line["signature"]) for line in lines if "signature" in line})
    signed = "".join(f'<p class="quiet">BLEU: <code>{_text(x)}</code></p>' for x in signatures)
    columns = "".join(f'<th scope="col" class="number">{x.label}</th>' for x in scores.values())
    return f"""<h2>Evaluations</h2>
{signed}<details><summary>All evaluations as a table</summary>
<table><thead><tr><th scope="col" class="number">step</th><th scope="col">set</th>
<th scope="col" class="number">loss, nats per token</th>{columns}
</tr></thead><tbody>{rows}</tbody></table></details>"""


def _settings(config: Mapping[str, Any]) -> str:
    groups = {name: value for name, value in config.items() if isinstance(value, dict)}
    others = {name: value for name, value in config.items() if name not in groups}
    if others:
        groups["run"] = others
    tables = "".join(
        f"<table><caption>{_text(name)}</caption><tbody>"
        + "".join(
            f'<tr><th scope="row">{_text(key)}</th><td><code>{_text(value)}</code></td></tr>'
            for key, value in _flattened(group)
        )
        + "</tbody></table>"
        for name, group in groups.items()
    )
    return f'<h2>Settings</h2>\n<div class="card settings">{tables}</div>'


def _flattened(group: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in group.items():
        if isinstance(value, dict) and value:
            rows += _flattened(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append((f"{prefix}{key}", text))
    return rows


def _series(
    metrics: Sequence[Metrics], kind: str, name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps and values of all lines of `kind` that have `name`."""
    points = [
        (line["step"], line[name]) for line in metrics if line.get("kind") == kind and name in line
    ]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _window(values: NDArray[np.float64]) -> int:
    """Values to average: few enough to follow the curve, enough to see it through the noise."""
    return max(3, values.size // 25)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _text(value: Any) -> str:
    """`value` as HTML; what shows as nothing is said to be empty."""
    text = str(value)
    return escape(text) if text.strip() else '<span class="quiet">(empty)</span>'


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: is {path.parent} a run directory?") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value
