"""Curves of a study as one standalone SVG: panels side by side, one line for each arm, a band of one standard deviation over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from e2e_fp8.observability.charts import short
from e2e_fp8.studies.claims import mean, spread

_COLOURS = ("#0b6bcb", "#d9480f", "#2b8a3e", "#9c36b5", "#b58900", "#0c8599", "#c2255c", "#5c6773")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LINE = 360, 230, 54, 26, 22, 15
_ACROSS = 3
_TITLE_CHARACTER = 7.0
"""Width of a title's character at most, on average."""
_STYLE = "text{font:11px system-ui,sans-serif;fill:#5f6b7a}.h{font-weight:600;fill:#1c2128;font-size:12px}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One arm: mean and half-width of the band at each step."""

    label: str
    steps: Sequence[float]
    means: Sequence[float]
    spreads: Sequence[float]
    """0 where one seed alone has the step."""


def curve_of(label: str, runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Curve | None:
    """Mean and sample standard deviation over ``runs``, each (steps, values), at every step that any has; None without a point."""
    by_step: dict[float, list[float]] = {}
    for steps, values in runs:
        for step, value in zip(steps, values, strict=True):
            by_step.setdefault(step, []).append(value)
    if not by_step:
        return None
    steps = sorted(by_step)
    deviations = [spread(by_step[s]) for s in steps]
    return Curve(
        label=label, steps=steps, means=[mean(by_step[s]) for s in steps], spreads=[0.0 if math.isnan(d) else d for d in deviations]
    )


def panels_svg(title: str, panels: Mapping[str, Sequence[Curve]]) -> str:
    """A standalone SVG file; all panels share both axes, so that they can be compared.

    Raises:
        ValueError: no panel has a curve.
    """
    curves = [curve for panel in panels.values() for curve in panel]
    if not curves:
        raise ValueError("a chart needs at least one curve")
    bottom = min(m - s for c in curves for m, s in zip(c.means, c.spreads, strict=True))
    top = max(m + s for c in curves for m, s in zip(c.means, c.spreads, strict=True))
    span = (min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves), bottom, top)
    legend = max(len(panel) for panel in panels.values()) * _LINE
    columns, rows = min(_ACROSS, len(panels)), -(-len(panels) // _ACROSS)
    height = _HEIGHT + legend + 10
    lines = wrap(title, int(columns * _WIDTH / _TITLE_CHARACTER))
    heading = "".join(f'<text class="h" x="8" y="{(index + 1) * _LINE + 1}">{escape(line)}</text>' for index, line in enumerate(lines))
    under = len(lines) * _LINE + 7
    parts = [
        f'<g transform="translate({index % columns * _WIDTH},{under + index // columns * height})">{_panel(name, panel, span)}</g>'
        for index, (name, panel) in enumerate(panels.items())
    ]
    size = f"{columns * _WIDTH} {rows * height + under + 8}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{escape(title)}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{heading}{"".join(parts)}</svg>\n'
    )


def _panel(name: str, curves: Sequence[Curve], span: tuple[float, float, float, float]) -> str:
    left, right, bottom, top = span
    width, height = _WIDTH - _LEFT - 14, _HEIGHT - _TOP - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + width * (step - left) / ((right - left) or 1.0)

    def y(value: float) -> float:
        return _TOP + height * (1.0 - (value - bottom) / ((top - bottom) or 1.0))

    parts = [f'<text class="h" x="{_LEFT}" y="14">{escape(name)}</text>']
    for fraction in (0.0, 0.5, 1.0):
        value, step = bottom + fraction * (top - bottom), left + fraction * (right - left)
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_LEFT + width}" stroke="#dfe3e8"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{step:.0f}</text>')
    for index, curve in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        points = list(zip(curve.steps, curve.means, curve.spreads, strict=True))
        upper = " ".join(f"{x(s):.1f},{y(m + d):.1f}" for s, m, d in points)
        lower = " ".join(f"{x(s):.1f},{y(m - d):.1f}" for s, m, d in reversed(points))
        line = " ".join(f"{x(s):.1f},{y(m):.1f}" for s, m, _ in points)
        parts.append(f'<polygon points="{upper} {lower}" fill="{colour}" opacity=".15"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.7"/>')
        at = _HEIGHT + (index + 1) * _LINE
        parts.append(f'<rect x="{_LEFT}" y="{at - 9}" width="9" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 14}" y="{at}">{escape(curve.label)}</text>')
    return "".join(parts)
