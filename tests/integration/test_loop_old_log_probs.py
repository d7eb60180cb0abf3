"""``training.old_log_probs: rollout`` in whole runs: the engine's own log-probs, the same bytes as with a pass of the trainer."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny_runs import assert_same_state, records, train_command

from e2e_fp8.orchestration.checkpoint import CheckpointStore

SHARED = (
    "numerics.alignment=bitwise", "run.steps=3", "run.checkpoint_interval=3", "run.eval_interval=0", "training.minibatches_per_step=2",
)  # fmt: skip
RUNS = {"recompute": (), "rollout": ("training.old_log_probs=rollout", "training.old_log_probs_audit=0.1")}


def run_both(out: Path, *more: str) -> dict[str, Path]:
    """Both runs at once: most of their time is imports and vLLM's start."""
    jobs = {}
    for name, fields in RUNS.items():
        with (out / f"{name}.log").open("w") as log:
            jobs[name] = subprocess.Popen(train_command(out, name, *SHARED, *fields, *more), stdout=log, stderr=log)
    for name, job in jobs.items():
        assert job.wait(timeout=550) == 0, (out / f"{name}.log").read_text()[-3000:]
    return {name: out / name for name in RUNS}


def check_bytes(folders: dict[str, Path]) -> None:
    """Receipts, trainer states and metrics of both runs are the same."""
    digests = [[(r["step"], r["digest"]) for r in records(folder, "receipts.jsonl")] for folder in folders.values()]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 4
    states = [CheckpointStore(folder / "checkpoints", keep=1).load(5)["trainer"] for folder in folders.values()]
    assert_same_state(*states, "trainer")
    for left, right in zip(*(records(folder) for folder in folders.values()), strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "ratio/mean", "mismatch_kl", "sft/loss"):
            assert left.get(name) == right.get(name), name


def check_audits(folders: dict[str, Path]) -> None:
    """The audits are counted, found nothing, and say what they saved."""
    steps = [r for r in records(folders["rollout"]) if r["phase"] == 1.0]
    assert [s["old_log_probs/audited_sequences"] for s in steps] == [16, 2, 2]
    assert [s["old_log_probs/audit_failures"] for s in steps] == [0, 0, 0]
    assert [s["mismatch_kl"] for s in steps] == [0, 0, 0]
    assert ["old_log_probs/seconds_saved" in s for s in steps] == [False, True, True]
    assert '"old_log_probs/' not in json.dumps(records(folders["recompute"]))
    for name, folder in folders.items():
        print(name, [(s.get("time/audit"), s["time/old_log_probs"]) for s in records(folder) if s["phase"] == 1.0])
    print([s.get("old_log_probs/seconds_saved") for s in steps])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return run_both(tmp_path_factory.mktemp("runs"))


def test_receipts_masters_and_metrics_are_the_same(folders):
    check_bytes(folders)


def test_the_audits_are_counted(folders):
    check_audits(folders)
