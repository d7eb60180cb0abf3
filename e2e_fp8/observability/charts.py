"""Line and stacked-bar charts as inline SVG. Colours are CSS variables of the page, so one chart serves light and dark."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from e2e_fp8.observability.style import COLOURS

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 30
MAX_POINTS = 1200
"""More points than this are thinned to the smallest and largest of each bin: a spike stays visible."""
MAX_BARS = 120
_CHARACTER = 6.5
"""Width of a character of an axis's numbers."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a chart."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    spread: Sequence[float] | None = None
    """Half-width of a band around the line, per value."""
    markers: bool = False
    joined: bool = True
    """False draws the points alone, for an x that goes back and forth."""


def line_chart(lines: Sequence[Line], *, from_zero: bool = False, x_name: str = "step") -> str:
    """SVG of lines over steps; values finite. ``from_zero`` puts 0 on the axis. Another ``x_name`` means that x need not be whole.

    Raises:
        ValueError: No line has a point.
    """
    lines = [line for line in lines if line.steps]
    if not lines:
        raise ValueError("a chart needs at least one point")
    xs = [x for line in lines for x in line.steps]
    lows, highs = zip(*(_extent(line) for line in lines), strict=True)
    bottom = min(0.0, min(lows)) if from_zero else min(lows)
    frame = _Frame(min(xs), max(xs), bottom, max(highs), whole=x_name == "step")
    parts = [frame.axes(x_name)]
    for index, line in enumerate(lines):
        parts.append(_draw_line(frame, line, index, x_name))
    return _wrap(parts, [line.label for line in lines])


def stacked_bars(steps: Sequence[float], layers: Mapping[str, Sequence[float]], *, unit: str = "") -> str:
    """SVG of one bar a step, layers on top of each other; beyond MAX_BARS steps a bar is the mean of neighbouring steps.

    Raises:
        ValueError: No steps or no layers.
    """
    if not steps or not layers:
        raise ValueError("a chart needs at least one bar")
    size = math.ceil(len(steps) / MAX_BARS)
    bins = [slice(i, i + size) for i in range(0, len(steps), size)]
    heights = {label: [math.fsum(values[b]) / len(values[b]) for b in bins] for label, values in layers.items()}
    totals = [math.fsum(column) for column in zip(*heights.values(), strict=True)]
    half = size / 2
    centres = [(steps[b][0] + steps[b][-1]) / 2 for b in bins]
    frame = _Frame(centres[0] - half, centres[-1] + half, 0.0, max(totals))
    width = max(1.0, (frame.x(half) - frame.x(-half)) * 0.82)
    parts = [frame.axes("step")]
    for column, centre in enumerate(centres):
        below = 0.0
        for index, (label, values) in enumerate(heights.items()):
            value = values[column]
            y_top, y_bottom = frame.y(below + value), frame.y(below)
            below += value
            tip = f"step {centre:g}, {escape(label)}: {short(value)} {escape(unit)}"
            parts.append(
                f'<rect class="fill{index % COLOURS}" x="{frame.x(centre) - width / 2:.1f}" y="{y_top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, y_bottom - y_top):.1f}"><title>{tip}</title></rect>'
            )
    return _wrap(parts, list(layers))


def short(value: float) -> str:
    """Number in at most four significant digits."""
    if not math.isfinite(value):
        return "n/a"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class _Frame:
    """Maps data to pixels and draws the axes."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, *, whole: bool = True) -> None:
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        # closer than ticks could be told apart
        if y_high - y_low <= max(1e-12 * max(abs(y_low), abs(y_high)), 1e-300):
            pad = abs(y_low) * 0.1 or 1.0
            y_low, y_high = (y_low, y_high + pad) if y_low == 0 else (y_low - pad, y_high + pad)
        self.y_ticks = _ticks(y_low, y_high, 4)
        step = self.y_ticks[1] - self.y_ticks[0]
        self.y_ticks = [step * i for i in range(math.floor(y_low / step + 1e-9), math.ceil(y_high / step - 1e-9) + 1)]
        self.x_low, self.x_high, self.y_low, self.y_high = x_low, x_high, self.y_ticks[0], self.y_ticks[-1]
        self.x_ticks = [t for t in _ticks(x_low, x_high, 6) if not whole or t == int(t)]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str) -> str:
        # below the numbers of the vertical axis; a number of the horizontal one that would meet it is left out
        taken = _CHARACTER * len(x_name)
        parts = [f'<text class="tick" x="0" y="{HEIGHT - 10}">{escape(x_name)}</text>']
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
        for tick in self.x_ticks:
            if self.x(tick) - _CHARACTER * len(short(tick)) / 2 > taken:
                parts.append(f'<text class="tick" x="{self.x(tick):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{short(tick)}</text>')
        return "".join(parts)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers 1, 2 or 5 times a power of ten apart that lie in or just around [low, high]; at least two."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _extent(line: Line) -> tuple[float, float]:
    spread = line.spread or [0.0] * len(line.values)
    return min(v - s for v, s in zip(line.values, spread, strict=True)), max(v + s for v, s in zip(line.values, spread, strict=True))


def _draw_line(frame: _Frame, line: Line, index: int, x_name: str) -> str:
    parts = []
    colour = index % COLOURS
    if line.spread is not None:
        triples = list(zip(line.steps, line.values, line.spread, strict=True))
        upper = [(x, v + s) for x, v, s in triples]
        lower = [(x, v - s) for x, v, s in reversed(triples)]
        parts.append(f'<polygon class="band fill{colour}" points="{_points(frame, upper + lower)}"/>')
    points = _thin(list(zip(line.steps, line.values, strict=True)))
    if len(points) > 1 and line.joined:
        parts.append(f'<polyline class="line{colour}" points="{_points(frame, points)}"/>')
    small = len(points) <= 60 or not line.joined
    if line.markers or small:
        radius = 3.5 if line.markers or len(points) == 1 else 2
        for x, v in points:
            parts.append(
                f'<circle class="fill{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(v):.1f}" r="{radius}">'
                f"<title>{escape(line.label)}, {escape(x_name)} {x:g}: {short(v)}</title></circle>"
            )
    return "".join(parts)


def _points(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in points)


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def _wrap(parts: Sequence[str], labels: Sequence[str]) -> str:
    legend = "".join(f'<span><i class="swatch{i % COLOURS}"></i>{escape(label)}</span>' for i, label in enumerate(labels))
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(labels))}">{"".join(parts)}</svg>'
    return f'<div class="legend">{legend}</div>{drawing}'
