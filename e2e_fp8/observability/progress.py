"""What the user sees while a run goes on, and one screen when it is over."""

import math
import os
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from e2e_fp8.observability.charts import short
from e2e_fp8.observability.figures import amdahl_bounds, duration, final_figures
from e2e_fp8.observability.history import load_history
from e2e_fp8.observability.names import PHASES

RECENT_STEPS = 5
"""Steps over which the remaining time is extrapolated."""

_SHOWN = {
    "reward/mean": "reward",
    "reward/held_out": "held-out",
    "mismatch_kl": "mismatch KL",
    "response_length/mean": "length",
    "entropy": "entropy",
    "rollout/tokens_per_s": "tok/s rollout",
    "train/tokens_per_s": "tok/s train",
    "sft/loss": "sft loss",
    "grad_norm": "grad norm",
    "skipped_steps": "skipped",
    "old_log_probs/audit_failures": "AUDIT FAILED, old log-probs recomputed: sequences that differ",
}
_SHOWN_UNLESS_0 = ("skipped_steps", "old_log_probs/audit_failures")


class Progress:
    """Live panel in a terminal; one plain line a step when stdout is not one or ``CI`` is set.

    Args:
        warm_steps: Supervised steps before RL.
        rl_steps: RL steps.
        console: Where to write; stdout by default.
    """

    def __init__(self, *, warm_steps: int, rl_steps: int, console: Console | None = None) -> None:
        self.warm_steps = warm_steps
        self.total_steps = warm_steps + rl_steps
        self.console = console or Console(highlight=False)
        self.live: Live | None = None
        if self.console.is_terminal and not os.environ.get("CI"):
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        # Steps are timed per phase of the run: a warm-start step says nothing about how long an RL step takes.
        self._step_ends: list[float] = [time.perf_counter()]
        self._in_warm_start: bool | None = None
        self._held_out = math.nan

    def update(self, step: int, record: dict[str, float]) -> None:
        """Show the record of ``step`` (warm-start and RL steps in one count, from 1)."""
        self._held_out = record.get("reward/held_out", self._held_out)
        eta = self._eta(step)
        if self.live is None:
            self.console.print(self._line(step, record, eta), markup=False, soft_wrap=True)
        else:
            self.live.update(self._panel(step, record, eta), refresh=True)

    def note(self, text: str) -> None:
        """One line of text, above the live panel."""
        self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last panel on the screen; a second call does nothing."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eta(self, step: int) -> float:
        """Seconds to the end of the current phase of the run."""
        warm = step <= self.warm_steps
        if self._in_warm_start is not None and warm != self._in_warm_start:
            self._step_ends = self._step_ends[-1:]
        self._in_warm_start = warm
        self._step_ends = [*self._step_ends[-RECENT_STEPS:], time.perf_counter()]
        per_step = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return per_step * ((self.warm_steps if warm else self.total_steps) - step)

    def _title(self, step: int) -> str:
        if step <= self.warm_steps:
            return f"warm start {step}/{self.warm_steps}"
        return f"RL step {step - self.warm_steps}/{self.total_steps - self.warm_steps}"

    def _line(self, step: int, record: dict[str, float], eta: float) -> str:
        figures = [f"{label} {text}" for label, text in _shown(record).items()]
        seconds = [f"{p} {record[f'time/{p}']:.1f}s" for p in PHASES if f"time/{p}" in record]
        return " | ".join([self._title(step), *figures, " ".join(seconds), f"ETA {duration(eta)}"])

    def _panel(self, step: int, record: dict[str, float], eta: float) -> Panel:
        grid = Table.grid(padding=(0, 3))
        shown = _shown(record)
        if step > self.warm_steps and math.isfinite(self._held_out):
            shown["held-out"] = short(self._held_out)
        pairs = [f"[dim]{label}[/dim] [bold]{value}[/bold]" for label, value in shown.items()]
        for start in range(0, len(pairs), 4):
            grid.add_row(*pairs[start : start + 4])
        phases = {p: record[f"time/{p}"] for p in PHASES if f"time/{p}" in record}
        bar = _bar(phases, 40)
        rows = Table.grid()
        rows.add_row(grid)
        rows.add_row("")
        rows.add_row(bar + "  " + "  ".join(f"[{_COLOURS[p]}]{p}[/] {s:.1f}s" for p, s in phases.items()))
        return Panel(rows, title=self._title(step), subtitle=f"ETA {duration(eta)}", title_align="left", subtitle_align="right")


def _shown(record: dict[str, float]) -> dict[str, str]:
    """Label and figure of what a step shows."""
    return {label: short(record[n]) for n, label in _SHOWN.items() if n in record and (n not in _SHOWN_UNLESS_0 or record[n])}


_PALETTE = (
    *("cyan", "white", "blue", "bright_cyan", "bright_blue", "red", "bright_magenta", "bright_red"),
    *("magenta", "green", "bright_green", "yellow", "bright_black"),
)
_COLOURS = dict(zip(PHASES, _PALETTE, strict=True))


def _bar(phases: dict[str, float], width: int) -> str:
    """Share of each phase as coloured blocks, ``width`` characters in all."""
    total = sum(phases.values())
    parts, drawn, below = [], 0, 0.0
    for phase, seconds in phases.items():
        below += seconds
        cells = round(width * below / total) - drawn if total else 0
        drawn += cells
        parts.append(f"[{_COLOURS[phase]}]{'█' * cells}[/]")
    return "".join(parts)


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """One screen about a finished run: rewards, mismatch, receipts, speed, seconds per phase, tiles, where the report is.

    Raises:
        UserError: No such run, or no metrics in it.
    """
    history = load_history(run_dir)
    table = Table(title=f"Run {history.config.get('run', {}).get('name', Path(run_dir).name)}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for figure in final_figures(history):
        style = {True: "green", False: "bold red", None: ""}[figure.good]
        table.add_row(figure.label, f"[{style}]{figure.value}[/]" if style else figure.value, figure.note)
    per_step = {p: s / len(history.values(f"time/{p}")) for p, s in history.phase_seconds().items()}
    table.add_row(
        "Seconds per step", "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in per_step.items()), "mean over steps with the phase"
    )
    bounds = "  ".join(f"{b.phase} {b.bound:.2f}x" for b in amdahl_bounds(history))
    table.add_row("Speed bounds", bounds, "of an RL step if the phase cost nothing")
    report = Path(run_dir) / "report.html"
    table.add_row(
        "Report", escape(str(report)) if report.exists() else "not written", "" if report.exists() else "e2e-fp8 report RUN_DIR writes it"
    )
    console = console or Console(highlight=False)
    console.print(table)
    for verdict in history.health():
        if verdict.firing:
            console.print(f"[bold red]ALARM[/] {escape(verdict.sentence())}")
