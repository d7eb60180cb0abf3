"""The smallest runs of the command line that are whole, and comparisons of what two of them left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from e2e_fp8.orchestration.checkpoint import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "training.warm_start.steps=2",
    "training.warm_start.batch_size=16",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "task.train_size=64",
    "task.held_out_size=8",
    "run.eval_interval=2",
    "run.eval_samples=1",
    "run.backend=cpu",
    "run.threads=1",
]


PLAIN = ("-m", "e2e_fp8.cli.main")
APART = (str(Path(__file__).with_name("apart_train.py")),)
"""The same with a server that may share the trainer's GPU over NCCL."""


def command(*words: object) -> list[str]:
    return [sys.executable, *PLAIN, *map(str, words)]


def train_command(
    out: Path, name: str, *overrides: str, config: str = "quickstart", resume: bool = False, program: tuple[str, ...] = PLAIN
) -> list[str]:
    sets = [word for item in (*TINY, f"run.out_dir={out}", f"run.name={name}", *overrides) for word in ("--set", item)]
    return [sys.executable, *program, "train", str(ROOT / f"configs/{config}.yaml"), *sets, *(["--resume"] if resume else [])]


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a child that imports from ``folders`` first, and from wherever this process may."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def run(words: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=590, cwd=ROOT, env={**os.environ, **(env or {})})


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def interrupt_after(words: list[str], metrics: Path, lines: int, signals: int = 1) -> tuple[int, str]:
    """Start a run, send SIGINT ``signals`` times once ``metrics`` holds ``lines`` records; returns exit code and stderr."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            break
        time.sleep(0.02)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def interrupt_and_resume(words: list[str], run_dir: Path, *, after: int, steps: int) -> None:
    """A run of ``steps`` steps, interrupted after step ``after`` at the earliest and before its last one, and continued to its end."""
    assert interrupt_after(words, run_dir / "metrics.jsonl", lines=after)[0] == 130
    stopped_at = CheckpointStore(run_dir / "checkpoints", keep=2).latest()
    assert stopped_at is not None
    assert after <= stopped_at < steps
    done = run([*words, "--resume"])
    assert done.returncode == 0, done.stderr[-3000:]


def assert_same_run(straight: Path, halves: Path, step: int) -> None:
    """Same state after ``step``, same records but for times, same last receipt."""
    first, second = (CheckpointStore(d / "checkpoints", keep=2).load(step) for d in (straight, halves))
    assert first.keys() == second.keys()
    for part in first.keys() - {"seconds"}:
        assert_same_state(first[part], second[part], part)
    timing = ("time", "per_s", "seconds", "share_of_sync", "memory/")
    for a, b in zip(records(straight), records(halves), strict=True):
        assert {k: v for k, v in a.items() if not any(t in k for t in timing)} == {
            k: v for k, v in b.items() if not any(t in k for t in timing)
        }
    assert [r["digest"] for r in records(straight, "receipts.jsonl")][-1] == [r["digest"] for r in records(halves, "receipts.jsonl")][-1]


def assert_same_state(a, b, where: str) -> None:
    """Two trees of state dictionaries: the same keys and types, tensors equal in every byte."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_state(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), where
    else:
        assert a == b, where
