"""Pictures for the report, as SVG without anything else."""

import math
from collections.abc import Mapping
from html import escape

from jax_transformer.verification.compare import SAME_FUNCTION
from jax_transformer.verification.histogram import Histogram

CHART_STYLE = """
.chart { width: 100%; height: auto; display: block; overflow: visible; }
.chart .limit { stroke: var(--quiet); stroke-dasharray: 4 4; }
.chart .grid { stroke: var(--line); }
.chart text { font-size: 12px; fill: var(--quiet); }
.chart .ok, .chart .theirs { fill: var(--blue); }
.chart .off, .chart .ours { fill: var(--bad); }
.chart .theirs, .chart .ours { fill-opacity: 0.6; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; opacity: 0.6; }
.key.ours { background: var(--bad); } .key.theirs { background: var(--blue); }
"""

WIDTH, HEIGHT = 1000.0, 220.0
"""Of the area that is drawn in."""

LOWEST, HIGHEST = -18, 1
"""Decimal exponents of the chart by depth; what is beyond is drawn at its edge."""


def picture(said: str, parts: list[str]) -> str:
    """The frame: 45 on the left for labels, 30 below."""
    return (
        f'<svg class="chart" viewBox="-45 -8 {WIDTH + 50:.0f} {HEIGHT + 38:.0f}" role="img" '
        f'aria-label="{escape(said)}">{"".join(parts)}</svg>'
    )


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """From one point to another."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    """Words at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def depth_chart(errors: Mapping[str, float]) -> str:
    """The error at each point in order, each module fed with the reference's values."""

    def y(exponent: float) -> float:
        inside = min(max(exponent, LOWEST), HIGHEST)
        return HEIGHT * (HIGHEST - inside) / (HIGHEST - LOWEST)

    drawn = []
    for exponent in range(-16, 1, 4):
        drawn.append(line("grid", 0, y(exponent), WIDTH, y(exponent)))
        drawn.append(text(-6, y(exponent) + 4, f"1e{exponent}", "end"))
    limit = y(math.log10(SAME_FUNCTION))
    drawn.append(line("limit", 0, limit, WIDTH, limit))
    step = WIDTH / max(len(errors), 1)
    for index, (point, error) in enumerate(errors.items()):
        place = LOWEST if error == 0 else HIGHEST if not math.isfinite(error) else math.log10(error)
        kind = "ok" if error <= SAME_FUNCTION else "off"
        drawn.append(
            f'<circle class="{kind}" cx="{(index + 0.5) * step:.1f}" cy="{y(place):.1f}" r="3">'
            f"<title>{escape(point)}: {error:.2e}</title></circle>"
        )
    drawn.append(text(0, HEIGHT + 18, "input", "start"))
    drawn.append(text(WIDTH, HEIGHT + 18, "output", "end"))
    worst = max(errors.values(), default=0.0)
    said = f"Relative error at {len(errors)} points in order, at most {worst:.1e}"
    return (
        f'<figure><p class="unit">relative error in float64, each module fed with the reference\'s '
        f"values, in the order of the computation; 0 is drawn at the bottom; dashed: "
        f"{SAME_FUNCTION:.0e}</p>{picture(said, drawn)}</figure>"
    )


def histogram_chart(histogram: Histogram) -> str:
    """Elements by the size of their error, a bar for each side."""
    filled = [
        index
        for index, pair in enumerate(zip(histogram.ours, histogram.theirs, strict=True))
        if any(pair)
    ]
    first, last = (filled[0], filled[-1] + 1) if filled else (0, 1)
    borders = histogram.borders[first : last + 1]
    span = max(borders[-1] - borders[0], 1.0)
    most = max(*histogram.ours, *histogram.theirs, 1)

    def x(exponent: float) -> float:
        return WIDTH * (exponent - borders[0]) / span

    drawn = [line("grid", 0, HEIGHT, WIDTH, HEIGHT)]
    for kind, counts in (("theirs", histogram.theirs), ("ours", histogram.ours)):
        for low, high, found in zip(borders, borders[1:], counts[first:last], strict=False):
            height = HEIGHT * found / most
            drawn.append(
                f'<rect class="{kind}" x="{x(low) + 1:.1f}" y="{HEIGHT - height:.1f}" '
                f'width="{max(x(high) - x(low) - 2, 1):.1f}" height="{height:.1f}">'
                f"<title>{kind}: {found:,} of 1e{low:g} to 1e{high:g}</title></rect>"
            )
    for exponent in range(math.ceil(borders[0]), math.floor(borders[-1]) + 1):
        drawn.append(text(x(exponent), HEIGHT + 18, f"1e{exponent}"))
    drawn.append(text(-6, 12, f"{most:,}", "end"))
    said = f"Histogram of the errors of the elements of {histogram.point}"
    return (
        f'<figure><p class="unit">elements by |error| / rms of the tensor'
        f'<span class="key ours"></span>ours<span class="key theirs"></span>the reference; '
        f"{others(histogram)}</p>{picture(said, drawn)}</figure>"
    )


def others(histogram: Histogram) -> str:
    """What no bar shows."""
    ours, theirs = histogram.exact
    said = f"without an error: {ours:,} and {theirs:,}"
    if any(histogram.broken):
        ours, theirs = histogram.broken
        said += f"; NaN or infinite: {ours:,} and {theirs:,}"
    return said
