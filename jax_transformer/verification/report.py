"""A report as one page of HTML that needs nothing else."""

from html import escape

from jax_transformer.training.report_style import STYLE
from jax_transformer.verification.charts import CHART_STYLE, depth_chart, histogram_chart
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.histogram import Histogram
from jax_transformer.verification.result import Report
from jax_transformer.verification.table import Row, label, rows, shown
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


def training_steps(trajectory: Trajectory | None) -> list[str]:
    """How far both sides are apart after each step of training."""
    if trajectory is None:
        return []
    names = ("loss", "off by", "gradient norm", "off by", "moments", "parameters")
    head = "".join(f'<th class="number">{name}</th>' for name in names)
    lines = []
    for step, (loss, norm) in enumerate(
        zip(trajectory.losses, trajectory.gradient_norms, strict=True), 1
    ):
        numbers = [
            f"{loss:.4f}",
            shown(trajectory.worst(step, "loss")[1]),
            f"{norm:.4g}",
            shown(trajectory.worst(step, "gradient norm")[1]),
            shown(trajectory.worst(step, "first moment", "second moment")[1]),
            shown(trajectory.worst(step, "parameter")[1]),
        ]
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        apart = trajectory.parting is not None and step >= trajectory.parting.step
        kind = ' class="off"' if apart else ""
        lines.append(f"<tr{kind}><td>{step}</td>{cells}</tr>")
    return [
        "<h2>Training in float64</h2>",
        f"<p>{marked(trajectory.verdict)}</p>",
        f'<div class="card scroll"><table class="modules"><thead><tr><th>step</th>{head}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>",
    ]
