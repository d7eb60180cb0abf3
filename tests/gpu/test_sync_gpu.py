"""Whole runs on the H200: every sync's receipt over both in-process transports, CUDA graphs, sleep and wake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
STEPS = 20


@pytest.mark.parametrize("config", ["quickstart_dense", "quickstart"])
@pytest.mark.parametrize(
    ("transport", "eager", "sleep_level"), [("shared", True, 0), ("shared", False, 1), ("local", False, 2), ("shared", False, 2)]
)
def test_twenty_syncs_pass_their_receipts(config, transport, eager, sleep_level, tmp_path):
    sets = {"run.out_dir": tmp_path, "run.name": "r", "run.steps": STEPS, "run.checkpoint_interval": 0, "run.eval_interval": STEPS}
    sets |= {"rollout.kv_cache_gib": 4, "run.backend": "cuda", "sync.transport": transport, "rollout.enforce_eager": eager}
    sets |= {"rollout.sleep_level": sleep_level, "training.warm_start.steps": 30, "run.tensorboard": False, "model.vocab_size": 128}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "e2e_fp8.cli.main", "train", f"configs/{config}.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-4000:])
    receipts = [json.loads(line) for line in (tmp_path / "r" / "receipts.jsonl").read_text().splitlines()]
    assert len(receipts) == STEPS + 1
    assert all(r["passed"] and r["tensors"] > 10 for r in receipts)
    assert len({r["digest"] for r in receipts}) == len(receipts), "two syncs had the same weights"
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["phase"] == 1.0]
    assert all(0 <= r["mismatch_kl"] < 0.02 for r in steps), [r["mismatch_kl"] for r in steps]
    copied = {r["sync/bytes"] for r in steps}
    seconds = sorted(r["sync/seconds"] for r in steps)[STEPS // 2]
    print(f"{config} {transport} eager={eager} sleep={sleep_level}: {copied} bytes copied, median sync {seconds:.4f} s")
    if transport == "shared":
        assert copied == {0.0}
