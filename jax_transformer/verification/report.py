"""A report as one page of HTML that needs nothing else."""

from collections.abc import Sequence
from html import escape

from jax_transformer.training.report_style import STYLE
from jax_transformer.verification.charts import CHART_STYLE, depth_chart, histogram_chart
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.decoding.compare import DecodingReport
from jax_transformer.verification.histogram import Histogram
from jax_transformer.verification.result import Report
from jax_transformer.verification.table import Row, label, rows, shown, verdict
from jax_transformer.verification.training.trajectory import Trajectory

OWN_STYLE = """
.verdict { font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.same { color: var(--green); } .different { color: var(--bad); }
.modules td:first-child { white-space: pre; font: 0.85em ui-monospace, monospace; }
.modules td { vertical-align: baseline; }
.modules .off td { color: var(--bad); font-weight: 600; }
"""


def page(report: Report, title: str) -> str:
    """The whole page: verdict, numbers, causes, error by depth, modules."""
    found = rows(report)
    kind = "same" if report.same else "different"
    body = "\n".join(
        (
            f"<header><h1>{escape(title)}</h1>"
            f'<p class="verdict {kind}">{marked(report.verdict)}</p></header>',
            f"<main>{tiles(report)}",
            *causes(report),
            f"<h2>Error by depth</h2>{depth_chart(report.errors)}",
            *worst_tensor(report.histogram),
            f'<h2>Modules</h2><div class="card scroll">{table(report, found)}</div>',
            *training_steps(report.trajectory),
            *decoding_ways(report.decoding),
            "</main>",
        )
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}{OWN_STYLE}{CHART_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def marked(text: str) -> str:
    """Names between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def tiles(report: Report) -> str:
    """The numbers in large."""
    ours, theirs = report.parameters
    numbers = [
        ("parameters", f"{ours:,}", f"{theirs:,} in the reference"),
        ("output in float64", f"{report.output_error:.1e}", f"at most {SAME_FUNCTION:.0e}"),
    ]
    if (tokens := report.distributions) is not None:
        numbers += [
            (f"KL in {report.dtype}", f"{tokens.kl:.1e}", "nats a token"),
            ("most likely token", f"{tokens.top1:.1%}", "the same"),
        ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd><strong>{value}</strong><small>{note}</small></dd></div>"
        for name, value, note in numbers
    )
    return f'<dl class="tiles">{cells}</dl>'


def causes(report: Report) -> list[str]:
    """A card for each module that differs, and one for what does not correspond."""
    cards = [
        f'<div class="card"><h3><code>{escape(each.module or "the model itself")}</code>, off by '
        f"{each.error:.1e} at <code>{escape(each.point)}</code></h3>"
        f"<p>{marked(each.sentence)}</p></div>"
        for each in report.causes
    ]
    cards += [f'<div class="card"><p>{escape(each)}</p></div>' for each in report.problems]
    return ["<h2>Causes</h2>", *cards] if cards else []


def worst_tensor(histogram: Histogram | None) -> list[str]:
    """How the errors of one tensor's elements are distributed."""
    if histogram is None:
        return []
    where = f"<code>{escape(histogram.point)}</code>"
    return [f"<h2>Elements of {where} in {histogram.dtype}</h2>", histogram_chart(histogram)]


def table(report: Report, found: list[Row]) -> str:
    """The module tree."""
    narrow = report.dtype is not None
    names = ["float64", *([f"ours, {report.dtype}", "theirs", "ratio"] if narrow else [])]
    names += ["gradient"] if report.gradients else []
    head = "".join(f'<th class="number">{name}</th>' for name in names)
    lines = []
    for row in found:
        numbers = [f"{row.error:.1e}"]
        if narrow:
            numbers += [shown(row.ours), shown(row.theirs), shown(row.ratio, "{:.2f}")]
        if report.gradients:
            numbers.append(shown(row.gradient))
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        name = "  " * row.module.count(".") + label(row.module)
        kind = "" if row.verdict == "same" else ' class="off"'
        lines.append(f"<tr{kind}><td>{escape(name)}</td>{cells}<td>{escape(row.verdict)}</td></tr>")
    return (
        f'<table class="modules"><thead><tr><th>module</th>{head}<th>verdict</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def decoding_ways(report: DecodingReport | None) -> list[str]:
    """What each way of decoding gives, and where it chooses another token."""
    if report is None:
        return []
    ways, choices = [], []
    for way in report.ways:
        kind = "" if way.same else ' class="off"'
        cells = (shown(way.error), f"{way.agreement:.0%}", verdict(way))
        ways.append(row(way.name, cells, kind))
        for choice in way.differences:
            cells = (
                f"prompt {choice.row}, token {choice.step}",
                f"{choice.tokens[0]}, {choice.tokens[1]}",
                ", ".join(map(shown, choice.margins)),
                shown(choice.error),
                "tie" if choice.tie else "fault",
            )
            choices.append(row(way.name, cells, "" if choice.tie else ' class="off"'))
    found = [
        f"<h2>Decoding in {report.dtype}</h2>",
        f"<p>{marked(report.verdict)}</p>",
        plain_table(("way", "logits in float64", "tokens alike", "verdict"), ways),
    ]
    if choices:
        found.append(plain_table(("way", "at", "tokens", "margins", "error", "verdict"), choices))
    return found


def row(name: str, cells: Sequence[str], kind: str) -> str:
    """A line of a table."""
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
    return f"<tr{kind}><td>{escape(name)}</td>{numbers}</tr>"


def plain_table(names: Sequence[str], lines: list[str]) -> str:
    """A table whose first column is names, the others numbers."""
    head = "".join(f'<th class="number">{name}</th>' for name in names[1:])
    return (
        f'<div class="card scroll"><table class="modules"><thead><tr><th>{names[0]}</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def training_steps(trajectory: Trajectory | None) -> list[str]:
    """How far both sides are apart after each step of training."""
    if trajectory is None:
        return []
    lines = []
    for step, (loss, norm) in enumerate(
        zip(trajectory.losses, trajectory.gradient_norms, strict=True), 1
    ):
        cells = (
            f"{loss:.4f}",
            shown(trajectory.worst(step, "loss")[1]),
            f"{norm:.4g}",
            shown(trajectory.worst(step, "gradient norm")[1]),
            shown(trajectory.worst(step, "first moment", "second moment")[1]),
            shown(trajectory.worst(step, "parameter")[1]),
        )
        apart = trajectory.parting is not None and step >= trajectory.parting.step
        lines.append(row(str(step), cells, ' class="off"' if apart else ""))
    names = ("step", "loss", "off by", "gradient norm", "off by", "moments", "parameters")
    return [
        "<h2>Training in float64</h2>",
        f"<p>{marked(trajectory.verdict)}</p>",
        plain_table(names, lines),
    ]
