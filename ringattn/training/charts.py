"""Charts as SVG text, without a plotting library: training writes them at the end of a run and must stay light.

Colours are CSS variables with a light and a dark value (THEME), so that a page, or a picture alone, follows the reader's setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
MAX_POINTS = 400  # of a line; more are thinned to the least and the most of each stretch, so that no spike is lost

THEME = """
:root { --paper: #ffffff; --ink: #1c2330; --soft: #667085; --grid: #e4e7ec; --card: #f7f8fa;
        --line0: #2f6fc4; --line1: #d1495b; --line2: #2e8b57; --line3: #a36a00; --line4: #7b4fb3; --line5: #00838f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e6e9ef; --soft: #98a2b3; --grid: #2c3440; --card: #1c222b;
          --line0: #79b0ff; --line1: #ff8a97; --line2: #6fd19b; --line3: #e8b454; --line4: #c3a2f2; --line5: #62cfd8; }
}
svg text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); font-size: 11px; }
svg .title { font-weight: 600; font-size: 13px; }
svg .on { fill: #ffffff; font-size: 11px; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
""".strip()
LINES = 6  # colours there are


@dataclass(frozen=True)
class Line:
    """One curve: (x, y) points in order of x; ``dots`` marks each of them."""

    name: str
    points: Sequence[Point]
    dots: bool = False


def svg(width: float, height: float, parts: Sequence[str], label: str, *, alone: bool = False) -> str:
    """An SVG element. ``alone``: for a file of its own, with theme, namespace and background inside."""
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}"'
    body = "\n".join(parts)
    if not alone:
        return f'{head} style="max-width:{1.2 * width:g}px">\n{body}\n</svg>'
    ground = f'<rect width="{width:g}" height="{height:g}" fill="var(--paper)"/>'
    head += f' xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
    return f"{head}>\n<style>{THEME}</style>\n{ground}\n{body}\n</svg>\n"


def text(x: float, y: float, content: object, *, kind: str = "", anchor: str = "start") -> str:
    """A text element; ``kind``: soft | title | on (light, on a coloured ground)."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{of_kind}>{escape(str(content))}</text>'


def line_chart(title: str, lines: Sequence[Line], *, x_name: str = "step", width: int = 560, height: int = 250, alone: bool = False) -> str:
    """A chart of curves over a common x, with a legend where there are several. Points that are not finite are left out."""
    drawn = [Line(n.name, [(x, y) for x, y in n.points if math.isfinite(x) and math.isfinite(y)], n.dots) for n in lines]
    drawn = [n for n in drawn if n.points]
    parts = [text(12, 20, title, kind="title")]
    if not drawn:
        return svg(width, height, [*parts, text(width / 2, height / 2, "no values", kind="soft", anchor="middle")], title, alone=alone)
    left, right = 58, width - 16
    legend = legend_places([n.name for n in drawn], left, right) if len(drawn) > 1 else []
    top = 34 + (legend[-1][1] - 36 + 18 if legend else 0)
    height += max(0, top - 52)
    bottom = height - 34
    xs, ys = [x for n in drawn for x, _ in n.points], [y for n in drawn for _, y in n.points]
    x_low, x_high = min(xs), max(xs)
    y_ticks = ticks(min(ys), max(ys))
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low) if y_high > y_low else 0.5
        return left + across * (right - left), bottom - up * (bottom - top)

    for y in y_ticks:
        _, at = place(x_low, y)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(left - 7, at + 4, tick_name(y, y_ticks), kind="soft", anchor="end"))
    x_ticks = [x for x in ticks(x_low, x_high) if x_low <= x <= x_high] or [x_low]
    for x in x_ticks:
        parts.append(text(place(x, y_low)[0], bottom + 16, tick_name(x, x_ticks), kind="soft", anchor="middle"))
    parts.append(text(right, height - 5, x_name, kind="soft", anchor="end"))
    for i, line in enumerate(drawn):
        colour = f"var(--line{i % LINES})"
        dashes = ' stroke-dasharray="5 3"' if i >= LINES else ""
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*p) for p in thinned(line.points)))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"{dashes}/>')
        if line.dots or len(line.points) == 1:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in (place(*p) for p in thinned(line.points))]
        if legend:
            x, y = legend[i]
            parts.append(f'<rect x="{x:.1f}" y="{y - 3}" width="14" height="4" rx="2" fill="{colour}"/>')
            parts.append(text(x + 19, y + 3, line.name, kind="soft"))
    return svg(width, height, parts, title, alone=alone)


def legend_places(names: Sequence[str], left: float, right: float) -> list[tuple[float, int]]:
    """Where each name of a legend starts: from left to right, as many rows as needed."""
    places, x, y = [], float(left), 36
    for name in names:
        wide = 34 + 6.2 * len(name)
        if x > left and x + wide > right:
            x, y = float(left), y + 16
        places.append((x, y))
        x += wide
    return places


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``; one number where the two are the same but for rounding."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return [low]
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_name(value: float, among: Sequence[float]) -> str:
    """A tick's label: with as many digits as tell the ticks apart, large numbers with k, M, G."""
    largest = max(abs(v) for v in among)
    gap = abs(among[1] - among[0]) if len(among) > 1 else 0.0
    if not value or not gap:
        return f"{value:.4g}"
    power = math.floor(math.log10(gap) + 1e-9)
    half = round(gap / 10.0**power, 3) == 2.5  # steps of 2.5 take a digit more
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= 2 * size:
            return f"{value / size:.{max(0, round(math.log10(size)) - power + half)}f}{unit}"
    digits = max(0, -power + half)
    return f"{value:.{digits}f}" if digits < 7 else f"{value:.{math.floor(math.log10(largest)) - power + 1 + half}g}"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about MAX_POINTS of them: the least and the most of each stretch, in order, with the first and the last point."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / MAX_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]
