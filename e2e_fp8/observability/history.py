"""What a run left in its folder, read back for the summary and the report."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from e2e_fp8.config.health import HealthConfig
from e2e_fp8.errors import UserError
from e2e_fp8.observability.health import Verdict, check_health
from e2e_fp8.observability.names import METRICS, PHASES


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """Files of one run, parsed."""

    run_dir: Path
    records: list[dict[str, float]]
    """Metric records in step order; a null is NaN."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """``{"step", "reward/held_out", "pass_at_k/1"}`` and further k, the one before RL included."""
    receipts: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def series(self, name: str, phase: float | None = None) -> tuple[list[float], list[float]]:
        """(steps, values) of a metric where it was logged and finite; of the warm start (0) or RL (1) alone if ``phase`` says so."""
        if name not in METRICS:
            raise ValueError(f"unknown metric {name}")
        evaluated = self.evaluations and (name == "reward/held_out" or name.startswith("pass_at_k/"))
        source = self.evaluations if evaluated else self.records
        points = {r["step"]: r[name] for r in source if name in r and math.isfinite(r[name]) and phase in (None, r.get("phase", 1.0))}
        return list(points), list(points.values())

    def values(self, name: str) -> list[float]:
        """Finite values of a metric in step order."""
        return self.series(name)[1]

    def receipt_counts(self) -> tuple[int, int, int]:
        """(passed, failed, not checked) weight syncs; a sync with no tensors compared had its receipt switched off."""
        checked = [r for r in self.receipts if r.get("tensors")]
        passed = sum(bool(r["passed"]) for r in checked)
        return passed, len(checked) - passed, len(self.receipts) - len(checked)

    def phase_seconds(self) -> dict[str, float]:
        """Total seconds per phase over the run, phases that occurred."""
        totals = {phase: sum(self.values(f"time/{phase}")) for phase in PHASES}
        return {phase: total for phase, total in totals.items() if total > 0}

    def health(self) -> list[Verdict]:
        """Every health monitor over the run, with the run's own thresholds.

        Raises:
            UserError: the ``health`` section of the run's config.yaml is not valid.
        """
        try:
            thresholds = HealthConfig.model_validate(self.config.get("health") or {})
        except ValidationError as error:
            raise UserError(f"{self.run_dir / 'config.yaml'}: section health is not valid; restore it.") from error
        return check_health(self.records, thresholds)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def load_history(run_dir: Path) -> RunHistory:
    """Read a run folder.

    Raises:
        UserError: No such folder, no or empty ``metrics.jsonl``, or a file that does not parse; names the file and line.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"Run folder {run_dir} does not exist; give a folder that `e2e-fp8 train` wrote, such as runs/NAME.")
    records = read_records(run_dir)
    if not records:
        raise UserError(f"{run_dir} has no metrics: metrics.jsonl is missing or empty; the run stopped before its first step.")
    return RunHistory(
        run_dir=run_dir,
        records=records,
        evaluations=_read_jsonl(run_dir / "evaluations.jsonl", ["step", "reward/held_out"]),
        receipts=_read_jsonl(run_dir / "receipts.jsonl", ["step", "passed"]),
        samples=_read_jsonl(run_dir / "samples.jsonl", ["step"]),
        config=_read_document(run_dir / "config.yaml"),
        environment=_read_document(run_dir / "environment.json"),
    )


def read_records(run_dir: Path) -> list[dict[str, float]]:
    """Metric records of a run in step order, a null as NaN; none when nothing was logged.

    Raises:
        UserError: ``metrics.jsonl`` does not parse; names the line.
    """
    lines = _read_jsonl(Path(run_dir) / "metrics.jsonl", ["step"])
    return sorted(({name: math.nan if value is None else value for name, value in r.items()} for r in lines), key=lambda r: r["step"])


def flatten(node: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as ``{"a.b": "text"}``, other values as text."""
    if isinstance(node, dict):
        flat: dict[str, str] = {}
        for key, value in node.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat or ({prefix: "{}"} if prefix else {})
    if isinstance(node, list):
        return {prefix: ", ".join(str(item) for item in node) or "(none)"}
    return {prefix: json.dumps(node) if node is None or isinstance(node, bool) else str(node)}


def _read_jsonl(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break  # the writer was killed inside this line
        try:
            record = json.loads(line)
            missing = [name for name in required if name not in record]
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} line {number} is not JSON; restore or remove that line.") from error
        if missing:
            raise UserError(f"{path} line {number} has no {missing[0]}; restore or remove that line.")
        records.append(record)
    return records


def _read_document(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = yaml.safe_load(path.read_text()) if path.suffix == ".yaml" else json.loads(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} does not parse; restore it from the run's start or remove it.") from error
    return document or {}
