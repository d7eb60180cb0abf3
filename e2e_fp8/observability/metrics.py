"""Where metric records go: a JSONL file, TensorBoard, Weights & Biases, or several at once (``protocols.MetricSink``)."""

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_fp8.errors import UserError, writing
from e2e_fp8.observability.names import check_names

if TYPE_CHECKING:
    from e2e_fp8.protocols import MetricSink  # imports torch, which reading a report does not need


class JsonlSink:
    """One flat JSON object a step, written and flushed at once: ``{"step": 3, "reward/mean": 0.25, ...}``.

    A number that is not finite is written as ``null``, as JSON has no NaN. The file is made with the first record.

    Args:
        path: The ``metrics.jsonl`` of the run.
        resume_step: Records of later steps, and a last line torn by a crash, are removed before the first append; 0 keeps none.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        self.path = Path(path)
        truncate_jsonl(self.path, resume_step)

    def log(self, step: int, record: dict[str, float]) -> None:
        """Append the record of ``step``. Raises ValueError for an unknown name."""
        check_names(record)
        line = {"step": step} | {name: _finite(value) for name, value in record.items()}
        line["step"] = step
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """Nothing is held open."""


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def truncate_jsonl(path: Path, step: int) -> None:
    """Keep the whole lines of ``path`` up to and including ``step``; an empty result removes the file.

    The new content replaces the old in one rename, so a crash loses no record that was to be kept.

    Raises:
        UserError: A line other than the last is not a JSON object with a step.
    """
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        if _step_of(path, number, line) <= step:
            kept.append(line)
    if not kept:
        path.unlink()
        return
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _step_of(path: Path, number: int, line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} line {number} is not a record with a step; restore the file or move it away before resuming.") from error


class TensorBoardSink:
    """Scalars as TensorBoard event files in ``folder``; ``step`` and ``phase`` are left out.

    Args:
        folder: Log folder, made if missing.
        resume_step: TensorBoard hides events of later steps that an interrupted session wrote.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def log(self, step: int, record: dict[str, float]) -> None:
        """Write every metric of the record at ``step``. Raises ValueError for an unknown name."""
        check_names(record)
        for name, value in record.items():
            if name not in ("step", "phase"):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """One W&B run; its mode and folder follow W&B's own environment variables (WANDB_MODE, WANDB_DIR).

    Args:
        project: W&B project.
        name: Name of the run.
        config: Configuration shown with the run, JSON values.

    Raises:
        UserError: The wandb package is not installed.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise UserError(
                f"run.wandb_project is {project!r} but the wandb package is not installed; install wandb, or set run.wandb_project to null."
            ) from error
        self._run = wandb.init(project=project, name=name, config=dict(config))
        # A resumed session is a new W&B run and starts after step 0; W&B's own counter would restart.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, record: dict[str, float]) -> None:
        """Send the record. Raises ValueError for an unknown name."""
        check_names(record)
        self._run.log(record | {"step": step})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class MultiSink:
    """Sends each record to all ``sinks``, in order."""

    def __init__(self, sinks: "Sequence[MetricSink]") -> None:
        self.sinks = list(sinks)

    def log(self, step: int, record: dict[str, float]) -> None:
        """Log to every sink. Raises ValueError for an unknown name before any sink is written."""
        check_names(record)
        for sink in self.sinks:
            sink.log(step, record)

    def close(self) -> None:
        """Close every sink, also when one of them fails; the first failure is raised at the end."""
        failures = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
