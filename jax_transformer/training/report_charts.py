"""Pictures for the report: line charts and heat maps as HTML with inline SVG.

A chart's curves are an SVG that stretches with the page, and its labels are text beside it that
does not, so that a narrow window gets a narrower chart with labels of the same size.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Side of the square that curves are drawn in; the page stretches it to the shape of the chart.
_BOX = 1000.0

# A curve of more points is drawn by the extremes of so many slices, a pixel or two each.
_SLICES = 400

# More single points than this would hide one another.
_MAX_DOTS = 40

_MAX_LABEL = 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over steps and the way to draw them."""

    label: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    color: Literal["train", "held-out", "rate"]
    style: Literal["faint", "bold", "dots"]


def line_chart(
    title: str, unit: str, curves: Sequence[Curve], *, from_zero: bool = False, digits: int = 2
) -> str:
    """A chart of `curves` over the steps.

    Values that are not finite leave gaps. Single values far above the others, such as the spikes
    of a loss, are cut off at the top rather than flattening all else.

    Args:
        title: what is shown.
        unit: the unit of the values, written at their axis.
        curves: at least one of them with a point.
        from_zero: let the value axis begin at 0.
        digits: decimals of the values in descriptions.
    """
    last_step = max(curve.steps.max() for curve in curves if curve.steps.size)
    low, high = _value_range(curves, from_zero)
    x_scale = _BOX / max(last_step, 1.0)
    y_scale = _BOX / (high - low)

    def points(curve: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        y = np.clip(_BOX - (curve.values - low) * y_scale, 0.0, _BOX)  # clip keeps NaN
        return curve.steps * x_scale, np.where(np.isfinite(curve.values), y, math.nan)

    y_ticks = nice_ticks(low, high, 5)
    x_ticks = nice_ticks(0.0, max(last_step, 1.0), 5, whole=True)
    rows = [float(_BOX - (tick - low) * y_scale) for tick in y_ticks]
    grid = "".join(f"M0 {y:.1f}H{_BOX:.0f}" for y in rows)
    drawn = [f'<path class="grid" d="{grid}"/>']
    for curve in curves:
        drawn += _drawn(curve, *points(curve), digits)
    labels = [
        f'<span class="y-tick" style="top:{y / _BOX:.2%}">{text}</span>'
        for y, text in zip(rows, _tick_texts(y_ticks), strict=True)
    ]
    labels += [
        f'<span class="x-tick" style="left:{tick * x_scale / _BOX:.2%}">{text}</span>'
        for tick, text in zip(x_ticks, _tick_texts(x_ticks), strict=True)
    ]
    described = f"{title}, {unit}, over {last_step:,.0f} steps. " + " ".join(
        _described(curve, digits) for curve in curves if curve.style != "faint"
    )
    legend = "".join(
        f'<li class="{curve.color} {curve.style}">{escape(curve.label)}</li>'
        for curve in curves
        if curve.steps.size
    )
    return f"""<figure class="chart">
<figcaption><h3>{escape(title)}</h3><ul class="legend">{legend}</ul></figcaption>
<p class="unit">{escape(unit)}</p>
<div class="plot"><svg viewBox="0 0 {_BOX:.0f} {_BOX:.0f}" preserveAspectRatio="none" role="img" \
aria-label="{escape(described)}">{"".join(drawn)}</svg>{"".join(labels)}</div>
<p class="x-title">step</p>
</figure>"""


def heat_map(
    rows: Sequence[str], columns: Sequence[str], weights: NDArray[np.float64], *, description: str
) -> str:
    """Cells that are the stronger in colour the greater their weight, with labels and a scale.

    Args:
        rows: T labels, from the top.
        columns: S labels, from the left.
        weights: [T, S], not negative. Those that are not finite are marked as such.
        description: the picture in words, for those who do not see it.
    """
    cell = min(38, max(19, 640 // max(len(rows), len(columns), 1)))
    finite = weights[np.isfinite(weights)]
    greatest = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    row_labels, column_labels = [_label(x) for x in rows], [_label(x) for x in columns]
    left = max((_text_width(x) for x in row_labels), default=0.0) + 10
    slanted = max((_text_width(x) for x in column_labels), default=0.0)
    top, right = slanted * math.sin(math.radians(50)) + 14, slanted * math.cos(math.radians(50))
    width, height = left + cell * len(columns) + right, top + cell * len(rows) + 2
    parts = [
        f'<rect class="field" x="{left:.0f}" y="{top:.0f}" width="{cell * len(columns)}" '
        f'height="{cell * len(rows)}"/>'
    ]
    for t, label in enumerate(row_labels):
        y = top + cell * (t + 0.5)
        parts.append(f'<text class="row" x="{left - 6:.0f}" y="{y:.1f}">{escape(label)}</text>')
    for s, label in enumerate(column_labels):
        x, y = left + cell * (s + 0.5), top - 6
        parts.append(
            f'<text class="column" transform="translate({x:.1f} {y:.1f}) rotate(-50)">'
            f"{escape(label)}</text>"
        )
    for t, s in np.ndindex(weights.shape):
        weight = float(weights[t, s])
        strength = weight / greatest
        if strength < 0.005:
            continue  # would not be seen, and most cells of a long sentence are such
        mark = f'fill-opacity="{strength:.2f}"' if math.isfinite(weight) else 'class="invalid"'
        parts.append(
            f'<rect x="{left + cell * s:.0f}" y="{top + cell * t:.0f}" width="{cell - 1}" '
            f'height="{cell - 1}" {mark}><title>{escape(f"{rows[t]} → {columns[s]}: {weight:.3f}")}'
            f"</title></rect>"
        )
    scale = "".join(f"<span>{greatest * part:.2f}</span>" for part in (0, 0.5, 1))
    return f"""<div class="scroll" tabindex="0" role="group" \
aria-label="heat map, scrolls sideways">
<svg class="heat" width="{width:.0f}" height="{height:.0f}" role="img" \
aria-label="{escape(description)}">{"".join(parts)}</svg></div>
<div class="scale" aria-hidden="true"><span>weight</span><div><div class="ramp"></div>\
<div class="ramp-ticks">{scale}</div></div></div>"""


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of the finite values within `window` around each finite value.

    At the start, where losses fall steeply, the window narrows on both sides, so that the curve
    is not bent; at the end it narrows on the right only, so that the last value stays a mean.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(values.size)
    reach = np.minimum(window // 2, index)
    first, last = index - reach, np.minimum(index + reach + 1, values.size)
    count = counts[last] - counts[first]
    return np.where(finite, (sums[last] - sums[first]) / np.maximum(count, 1), math.nan)


def thin(
    x: NDArray[np.float64], y: NDArray[np.float64], slices: int = _SLICES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most four points of each slice of `x`: its first, lowest, highest and last one.

    Drawn at one slice a pixel, they look the same as all points (the M4 aggregation of Jugel
    et al. 2014). Gaps (NaN) stay gaps unless they are narrower than a slice.
    """
    if x.size <= 4 * slices:
        return x, y
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], slices + 1)[1:-1])
    kept: set[int] = set()
    for part in np.split(np.arange(x.size), edges):
        if part.size:
            kept |= {int(part[0]), int(part[-1])}
            finite = part[np.isfinite(y[part])]
            if finite.size:
                kept |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
    if whole:
        spacing = max(spacing, 1.0)
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [n * spacing for n in range(first, last + 1)]


def _value_range(curves: Sequence[Curve], from_zero: bool) -> tuple[float, float]:
    """The values to show: all of them, but for the outermost percent of a faint curve.

    A bold curve beside a faint one is its mean, which a single spike lifts out of all proportion.
    """
    faint = any(curve.style == "faint" for curve in curves)
    bounds: list[float] = []
    for curve in curves:
        finite = curve.values[np.isfinite(curve.values)]
        if finite.size and not (faint and curve.style == "bold"):
            margin = 0.5 if curve.style == "faint" else 0.0
            bounds += np.percentile(finite, [margin, 100.0 - margin]).tolist()
    if not bounds:
        return 0.0, 1.0
    low, high = min(bounds), max(bounds)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value only: centre it
        reach = abs(high) / 2 or 0.5
        return low - reach, high + reach
    margin = 0.05 * (high - low)
    return (low if from_zero and low == 0.0 else low - margin), high + margin


def _drawn(curve: Curve, x: NDArray[np.float64], y: NDArray[np.float64], digits: int) -> list[str]:
    kind = f"{curve.color} {curve.style}"
    thin_x, thin_y = thin(x, y)
    paths = [f'<path class="{kind}" d="{_path(thin_x, thin_y)}"/>']
    if curve.style != "dots" and x.size > 1:
        return paths
    if x.size > _MAX_DOTS:
        chosen = np.unique(np.linspace(0, x.size - 1, _MAX_DOTS).round().astype(int))
    else:
        chosen = np.arange(x.size)
    for i in chosen:
        if math.isfinite(y[i]):
            title = f"step {curve.steps[i]:,.0f}: {curve.values[i]:.{digits}f}"
            dot = f'd="M{x[i]:.1f} {y[i]:.1f}h0"'  # no length, but round ends: a circle
            paths.append(f'<path class="{kind} dot" {dot}><title>{title}</title></path>')
    return paths


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    parts, pen_down = [], False
    for point_x, point_y in zip(x, y, strict=True):
        drawable = math.isfinite(point_y)
        if drawable:
            parts.append(f"{'L' if pen_down else 'M'}{point_x:.1f} {point_y:.1f}")
        pen_down = drawable
    return "".join(parts)


def _described(curve: Curve, digits: int) -> str:
    finite = curve.values[np.isfinite(curve.values)]
    if not finite.size:
        return f"{curve.label}: no finite value."
    first, last = f"{finite[0]:.{digits}f}", f"{finite[-1]:.{digits}f}"
    return f"{curve.label}: {last}." if finite.size == 1 else f"{curve.label}: {first} to {last}."


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
    digits = max(0, -math.floor(math.log10(spacing or 1.0) + 1e-9))
    if digits == 0 and all(tick % 1_000_000 == 0 for tick in ticks) and max(ticks) > 0:
        return [f"{tick / 1e6:,.0f}M" if tick else "0" for tick in ticks]
    return [f"{tick:,.{digits}f}".replace("-", "\N{MINUS SIGN}") for tick in ticks]


def _label(token: str) -> str:
    """A token as it can be read: white space made visible, long ones cut."""
    text = token.strip() or "␣"
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


def _text_width(text: str) -> float:
    """Pixels that `text` takes at the labels' size of 12 pixels, rather too many than too few."""
    return sum(13.0 if unicodedata.east_asian_width(c) in "WF" else 7.2 for c in text)
