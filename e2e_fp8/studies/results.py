"""What the runs of a study left behind, as numbers: figures of every run, their mean and spread over seeds, curves."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_fp8.observability.history import RunHistory, load_history
from e2e_fp8.studies.claims import mean
from e2e_fp8.studies.runs import PlannedRun, check_same_settings, steps_done, stored_config
from e2e_fp8.studies.schema import Figure, Study

TAIL = 5
"""Steps of ``over: tail``."""
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One complete run."""

    arm: str
    seed: int
    figures: dict[str, float]
    """NaN where the run does not log the metric."""
    curves: dict[str, tuple[list[float], list[float]]]
    """Metric -> (RL steps from 0, values)."""
    receipts: tuple[int, int]
    """(passed, compared) weight syncs."""
    seconds: float
    environment: dict[str, Any]


@dataclass(kw_only=True)
class Results:
    """All complete runs of a study at one size, and the names of the others."""

    runs: list[RunResult] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Run -> ``not started`` or how many of its steps are done."""
    steps: int = 0

    def values(self, figure: str) -> dict[str, dict[int, float]]:
        """Finite values of a figure, arm -> seed -> value."""
        found: dict[str, dict[int, float]] = {}
        for run in self.runs:
            if math.isfinite(run.figures[figure]):
                found.setdefault(run.arm, {})[run.seed] = run.figures[figure]
        return found

    def of_arm(self, arm: str) -> list[RunResult]:
        """Complete runs of one arm, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)


def read_results(study: Study, planned: Sequence[PlannedRun]) -> Results:
    """Read every run that is done.

    Raises:
        ConfigError: a run folder holds other settings than the study.
        UserError: a file of a run does not parse.
    """
    results = Results()
    for run in planned:
        steps = steps_done(run.folder)
        wanted = stored_config(run).run.steps if steps else None
        if wanted is None or steps < wanted:
            results.missing[run.name] = "not started" if wanted is None else f"{steps} of {wanted} steps"
            continue
        check_same_settings(run)
        results.steps = wanted
        results.runs.append(_result(study, run, load_history(run.folder)))
    return results


def _result(study: Study, run: PlannedRun, history: RunHistory) -> RunResult:
    passed, failed, _ = history.receipt_counts()
    first = min(record["step"] for record in history.records if record.get("phase") == 1.0) - 1
    curves = {}
    for name in study.curves:
        steps, values = history.series(name, phase=1.0)
        curves[name] = ([step - first for step in steps], values)
    return RunResult(
        arm=run.arm,
        seed=run.seed,
        figures={name: figure_of(history, figure) for name, figure in study.figures.items()},
        curves=curves,
        receipts=(passed, passed + failed),
        seconds=history.records[-1].get("time", math.nan),
        environment=history.environment,
    )


def figure_of(history: RunHistory, figure: Figure) -> float:
    """The figure of one run; NaN when the metric was never logged, or once only for a gain."""
    values = history.series(figure.metric, phase=1.0)[1]
    if not values or (figure.over == "gain" and len(values) < 2):
        return math.nan
    reductions = {
        "mean": mean(values),
        "first": values[0],
        "last": values[-1],
        "max": max(values),
        "tail": mean(values[-TAIL:]),
        "gain": values[-1] - values[0],
    }
    return reductions[figure.over]


def as_json(results: Results, *, study: str, size: str, settings: Mapping[str, Any]) -> str:
    """Every number of the page and the curves behind its figures."""
    document = {
        "study": study,
        "size": size,
        "settings": settings,
        "steps": results.steps,
        "missing": results.missing,
        "runs": [
            {
                "arm": run.arm,
                "seed": run.seed,
                "figures": {name: _rounded(value) for name, value in run.figures.items()},
                "receipts_passed": run.receipts[0],
                "receipts_compared": run.receipts[1],
                "seconds": _rounded(run.seconds),
                "commit": run.environment.get("commit"),
                **({"same_run_as": run.environment["same_run_as"]} if "same_run_as" in run.environment else {}),
                "curves": {
                    name: {"step": steps, "value": [_rounded(v) for v in values]} for name, (steps, values) in run.curves.items() if steps
                },
            }
            for run in results.runs
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def write_text(path: Path, text: str) -> Path:
    """Write a file of the report, its folder first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
