#!/usr/bin/env python3
"""What a step wins without the pass that computes the old log-probs: ``training.old_log_probs`` rollout against recompute, in one run.

    python benchmarks/old_log_probs_cost.py configs/moe_0p5b_h200.yaml --steps 6 --set training.warm_start.steps=8

Needs ``numerics.alignment: bitwise``, which is set. One trainer and one engine take whole RL steps by turns, one with the pass and one
with the audit alone, so both see the same machine and nearly the same weights; the first of each kind (kernels, and the audit of
everything) are not counted. Prints one JSON object; exit code 1 when an audit found a difference.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from e2e_fp8.config.load import load_config

Mode = Literal["recompute", "rollout"]
WARM: tuple[Mode, ...] = ("rollout", "rollout", "recompute")
"""Modes of the steps before those that are measured."""


def step_seconds(session: Any, cfg: Any, mode: Mode, step: int) -> dict[str, float]:
    """One whole RL step: its wall seconds and its record."""
    import torch

    from e2e_fp8.observability.timers import PhaseTimer
    from e2e_fp8.orchestration.rl_step import run_step

    session.cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"old_log_probs": mode})})
    begun = time.perf_counter()
    record = run_step(session, step, PhaseTimer(), census=False).record
    if session.trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return record | {"seconds": time.perf_counter() - begun}


def summary(records: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of one mode."""
    names = ["seconds", *(f"time/{phase}" for phase in ("rollout", "old_log_probs", "audit", "update", "sync", "receipt"))]
    medians = {name: statistics.median([r[name] for r in records]) for name in names if all(name in r for r in records)}
    return medians | {"step_seconds": [r["seconds"] for r in records], "tokens": statistics.median([r["tokens/train"] for r in records])}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All steps, by turns."""
    cfg = load_config(args.config, [*args.set, "numerics.alignment=bitwise", f"run.out_dir={folder}"])
    from e2e_fp8.orchestration.session import open_session
    from e2e_fp8.orchestration.warm_start import warm_start

    session = open_session(cfg, folder / "model")
    cfg = session.cfg
    warm_start(session, 0, lambda *_: None)
    session.start_rollout()
    session.sync()
    modes = [*WARM, *(["recompute", "rollout"] * args.steps)]
    records = [step_seconds(session, cfg, mode, step) for step, mode in enumerate(modes)]
    session.close()
    counted = list(zip(modes, records, strict=True))[len(WARM) :]
    by_mode: dict[str, Any] = {m: summary([r for mode, r in counted if mode == m]) for m in ("recompute", "rollout")}
    failures = sum(r.get("old_log_probs/audit_failures", 0.0) for r in records)
    differences = max(r["train_rollout_logprob_abs_diff/max"] for r in records)
    won = 1 - by_mode["rollout"]["seconds"] / by_mode["recompute"]["seconds"]
    return by_mode | {"step_time_won": won, "audit_failures": failures, "largest_difference": differences, "arguments": sys.argv[1:]}


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="of each mode")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        result = measure(args, Path(folder))
    print(json.dumps(result, indent=2))
    return int(result["audit_failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
