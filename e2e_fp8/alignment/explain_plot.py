"""One figure of an explanation: causes, layers, positions."""

from pathlib import Path
from typing import Any

_COLOURS = {"baseline": "#2b8a3e", "cause": "#0b6bcb", "total": "#d9480f", "what_if": "#8a94a0"}
_LABELS = {"cause": "open in the configuration", "total": "the configuration", "what_if": "put on the baseline alone"}

_SMALLEST_SHOWN = 1e-5
"""Share of the largest row below which a row has its number alone, so that rounding of the last bit does not take the axis."""


def draw(record: dict[str, Any], path: Path) -> None:
    """Write ``record`` (e2e_fp8.alignment.explain_run.record_of) as a PNG: mismatch KL of each row, relative error of each module of the
    configuration in the order of a forward pass, mean |difference of log-probs| at each position of the response."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (causes, layers, positions) = plt.subplots(1, 3, figsize=(17, 6), width_ratios=[1.25, 1.25, 0.8], layout="constrained")
    _draw_causes(causes, record["rows"])
    _draw_layers(layers, record["modules"])
    _draw_positions(positions, record["positions"])
    figure.suptitle(f"mismatch of trainer and engine, numerics.alignment={record['alignment']}, {record['tokens']:,} tokens")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_causes(axes: Any, rows: list[dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    names = [row["name"] for row in rows][::-1]
    values = [row["metrics"]["mismatch_kl"] for row in rows][::-1]
    kinds = [row["kind"] for row in rows][::-1]
    positive = [v for v in values if v > 0]
    largest = max(positive, default=1e-5)
    floor = max(min(positive, default=1e-6) / 3, largest * _SMALLEST_SHOWN)
    axes.barh(names, values, color=[_COLOURS[k] for k in kinds])
    if positive:
        axes.set_xscale("log")
    axes.set_xlim(floor, 12 * largest)
    for index, value in enumerate(values):
        axes.text(max(value, floor) * 1.08, index, f"{value:.2g}" if value else "0", va="center", fontsize=8)
    handles = [Patch(color=_COLOURS[kind], label=label) for kind, label in _LABELS.items() if kind in kinds]
    axes.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=1, frameon=False)
    axes.set_title("mismatch KL (k3), one cause at a time", fontsize=10)
    axes.tick_params(labelsize=8)


def _draw_layers(axes: Any, modules: list[dict[str, Any]]) -> None:
    errors = [m["relative_error"] for m in modules]
    axes.plot(range(len(modules)), errors, marker=".", color=_COLOURS["cause"], linewidth=1)
    first = next((i for i, m in enumerate(modules) if m["first_row"] is not None), None)
    if first is not None:
        axes.axvline(first, color=_COLOURS["total"], linewidth=1, linestyle=":")
        axes.set_title(f"relative error by module; first: {modules[first]['module']}", fontsize=10)
        axes.set_yscale("symlog", linthresh=min((e for e in errors if e > 0), default=1e-6))
    else:
        axes.set_title("relative error by module: none differs", fontsize=10)
    axes.set_xticks(range(len(modules)), [m["module"].removeprefix("layers.") for m in modules], rotation=90, fontsize=6)
    axes.set_ylim(bottom=0)


def _draw_positions(axes: Any, positions: list[dict[str, Any]]) -> None:
    xs = [p["position"] for p in positions]
    axes.plot(xs, [p["abs_mean"] for p in positions], marker="o", markersize=3, color=_COLOURS["cause"], label="mean")
    axes.plot(xs, [p["abs_max"] for p in positions], marker="o", markersize=3, color=_COLOURS["total"], label="largest")
    axes.set_title("|difference of log-probs| by position", fontsize=10)
    axes.set_xlabel("token of the response, from 0", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
