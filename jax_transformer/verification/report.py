"""A report as one page of HTML that needs nothing else."""

import math
from html import escape

from jax_transformer.training.report_style import STYLE
from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.result import Report
from jax_transformer.verification.table import Row, rows, shown
from jax_transformer.verification.training.trajectory import Trajectory

OWN_STYLE = """
.verdict { font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.same { color: var(--green); } .different { color: var(--bad); }
.depth { width: 100%; height: 240px; display: block; overflow: visible; }
.depth .limit { stroke: var(--quiet); stroke-dasharray: 4 4; }
.depth .grid { stroke: var(--line); }
.depth text { font-size: 11px; fill: var(--quiet); }
.depth .ok { fill: var(--blue); } .depth .off { fill: var(--bad); }
.modules td:first-child { white-space: pre; font: 0.85em ui-monospace, monospace; }
.modules .off td { color: var(--bad); font-weight: 600; }
"""

LOWEST, HIGHEST = -18, 1
"""Decimal exponents of the chart; what is beyond is drawn at its edge."""


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
            f"<h2>Error by depth</h2>{depth_chart(report)}",
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
<style>{STYLE}{OWN_STYLE}</style>
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


def depth_chart(report: Report) -> str:
    """The error at each point in order, each module fed with the reference's values."""
    width, height = 1000.0, 220.0

    def y(exponent: float) -> float:
        inside = min(max(exponent, LOWEST), HIGHEST)
        return height * (HIGHEST - inside) / (HIGHEST - LOWEST)

    drawn = []
    for exponent in range(-16, 1, 4):
        line = f'<line class="grid" x1="0" x2="{width:.0f}" y1="{y(exponent):.1f}"'
        drawn.append(f'{line} y2="{y(exponent):.1f}"/>')
        drawn.append(
            f'<text x="-6" y="{y(exponent) + 4:.1f}" text-anchor="end">1e{exponent}</text>'
        )
    limit = y(math.log10(SAME_FUNCTION))
    drawn.append(f'<line class="limit" x1="0" x2="{width:.0f}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    step = width / max(len(report.errors), 1)
    for index, (point, error) in enumerate(report.errors.items()):
        place = LOWEST if error == 0 else HIGHEST if not math.isfinite(error) else math.log10(error)
        kind = "ok" if error <= SAME_FUNCTION else "off"
        drawn.append(
            f'<circle class="{kind}" cx="{(index + 0.5) * step:.1f}" cy="{y(place):.1f}" r="3">'
            f"<title>{escape(point)}: {error:.2e}</title></circle>"
        )
    worst = max(report.errors.values(), default=0.0)
    said = f"Relative error at {len(report.errors)} points in order, at most {worst:.1e}"
    return (
        f'<figure><p class="unit">relative error in float64, points in order; 0 is drawn at the '
        f'bottom</p><svg class="depth" viewBox="-45 -8 1050 240" role="img" '
        f'aria-label="{said}">{"".join(drawn)}</svg></figure>'
    )


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
        name = "  " * row.module.count(".") + (row.module.rpartition(".")[2] or "model")
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
