"""Receipts of a run: every sync in ``receipts.jsonl``, and the table of every tensor for the syncs that can be checked later.

A table is ``receipts/step_00000012.rank_0.tsv``, some 110 bytes a tensor (2 MB for 20,000). Tables are kept for the steps that have a
checkpoint and for the last sync; of every other sync the combined digest in ``receipts.jsonl`` remains. They are written with the
checkpoint, so that a sync itself writes one line.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_fp8.errors import CheckpointError, UserError
from e2e_fp8.sync.receipt import Manifest, parse_table, receipt_record, render_table

if TYPE_CHECKING:
    # Reading receipts must not start the engines.
    from e2e_fp8.orchestration.weight_sync import SyncReport

RECEIPTS = "receipts.jsonl"
_TABLES = "receipts"
_NAME = re.compile(r"step_(\d{8,})\.rank_(\d+)\.tsv")


def table_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where the table of one rank's receipt is, if it is kept."""
    return run_dir / _TABLES / f"step_{step:08d}.rank_{rank}.tsv"


class ReceiptLog:
    """Writes the receipts of one run under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._last: tuple[int, Manifest, dict[str, Any]] | None = None

    def record(self, sync: "SyncReport", step: int) -> None:
        """Append the line of a sync; remember its table for :meth:`keep`."""
        line: dict[str, Any] = {"step": step, "policy_version": sync.policy_version, "tensors": 0, "bytes": 0, "digest": ""}
        if sync.receipt is not None:
            line = receipt_record(sync.receipt, policy_version=sync.policy_version, step=step)
            self._last = (step, sync.receipt, line)
        line |= {"seconds": sync.seconds, "receipt_seconds": sync.receipt_seconds, "passed": line["tensors"] > 0}
        with open(self.root / RECEIPTS, "a") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, steps: list[int]) -> None:
        """Write the table of the last sync and remove tables of steps other than that and ``steps``.

        Raises:
            CheckpointError: the table could not be written.
        """
        if self._last is None:
            return
        step, manifest, record = self._last
        final = table_path(self.root, step, manifest.rank)
        partial = final.with_suffix(".partial")
        try:
            final.parent.mkdir(exist_ok=True)
            partial.write_text(render_table(manifest, record))
            os.replace(partial, final)
        except OSError as error:
            raise CheckpointError(f"Receipt table {final} was not written: {error.strerror}; free some space and resume.") from error
        self._remove(lambda old: old != step and old not in steps)

    def rewind(self, step: int) -> None:
        """Remove tables of later steps than ``step``, which a resumed run will do again."""
        self._remove(lambda old: old > step)

    def _remove(self, doomed: Callable[[int], bool]) -> None:
        for path in (self.root / _TABLES).glob("*.tsv"):
            match = _NAME.fullmatch(path.name)
            if match and doomed(int(match[1])):
                path.unlink()


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of ``receipts.jsonl`` whose receipt compared something, in order.

    Raises:
        UserError: no such file, or a line does not parse.
    """
    path = run_dir / RECEIPTS
    if not path.exists():
        raise UserError(f"{run_dir} has no {RECEIPTS}: the run ended before its first sync, so there is no receipt to verify.")
    records = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break  # the writer was killed inside this line
        try:
            record = json.loads(line)
            if record["tensors"]:
                records.append(record)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} line {number} is not a receipt; restore that line from a copy of the run.") from error
    return records


def read_table(run_dir: Path, record: dict[str, Any]) -> Manifest | None:
    """The table behind a record, or None when only its combined digest was kept.

    Raises:
        UserError: the table was altered, or is not the record's.
    """
    path = table_path(run_dir, record["step"], record["rank"])
    if not path.exists():
        return None
    try:
        manifest, head = parse_table(path.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the receipt that the run wrote ({error}); restore it, or remove it to compare without it."
        ) from error
    if head["digest"] != record["digest"] or head["policy_version"] != record["policy_version"]:
        raise UserError(f"{path} and {run_dir / RECEIPTS} disagree about step {record['step']}: one of the two was altered.")
    return manifest
