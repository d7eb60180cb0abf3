"""Calibrated clipping in the whole loop, in real processes, through the command line."""

import shutil
from pathlib import Path

import pytest
from tiny_runs import records, run, train_command

from e2e_fp8.orchestration.checkpoint import CheckpointStore

SETS = ["training.minibatches_per_step=3", "training.learning_rate=0.003", "run.steps=3", "run.eval_interval=0", "objective.clip_low=0.002"]


def rl_records(run_dir: Path) -> list[dict]:
    return [r for r in records(run_dir) if r["phase"] == 1.0]


@pytest.mark.slow
def test_a_resumed_run_calibrates_as_an_unbroken_one(tmp_path):
    """Interval 4 over 3 mini-batches a step: the third step clips with the second's range and its own pass depends on their count."""
    sets = [*SETS, "objective.calibration.interval=4", "run.checkpoint_interval=1", "run.keep_checkpoints=9"]
    done = run(train_command(tmp_path, "straight", *sets))
    assert done.returncode == 0, done.stderr[-3000:]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    shutil.copytree(straight, broken)
    last = max(CheckpointStore(broken / "checkpoints", keep=9).steps())
    shutil.rmtree(broken / f"checkpoints/step_{last:08d}")
    done = run(train_command(tmp_path, "broken", *sets, resume=True))
    assert done.returncode == 0, done.stderr[-3000:]

    first, second = rl_records(straight), rl_records(broken)
    assert [r["clip_calibration/passes"] for r in first] == [0.0, 1.0, 1.0]
    assert len({r["clip_calibration/clip_low"] for r in first}) > 1
    timed = ("time", "seconds", "per_s", "share_of_sync", "memory/")
    for a, b in zip(first, second, strict=True):
        assert [(k, v) for k, v in a.items() if not any(t in k for t in timed)] == [
            (k, v) for k, v in b.items() if not any(t in k for t in timed)
        ]
    states = [CheckpointStore(root / "checkpoints", keep=9).load_latest() for root in (straight, broken)]
    assert states[0]["clip_state"] == states[1]["clip_state"]
    masters = [{name: entry["master"] for name, entry in state["trainer"]["parameters"].items()} for state in states]
    assert all(bool((masters[0][name] == masters[1][name]).all()) for name in masters[0])
