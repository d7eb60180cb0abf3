"""A run folder with plausible numbers, written through the same sink as a real run."""

import json
import math
import random
from pathlib import Path

import yaml

from e2e_fp8.config.root import Config
from e2e_fp8.observability.metrics import JsonlSink
from e2e_fp8.observability.names import OPERANDS, TILE_STATISTICS


def write_run(root: Path, *, warm_steps: int = 20, rl_steps: int = 30, seed: int = 0) -> Path:
    """Write config, environment, metrics, evaluations, receipts and samples under ``root``; returns ``root``."""
    rng = random.Random(seed)
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text(yaml.safe_dump(Config().model_dump(mode="json"), sort_keys=False))
    (root / "environment.json").write_text(json.dumps({"python": "3.12", "torch": "2.11.0", "NVTE_X": "1"}))
    sink = JsonlSink(root / "metrics.jsonl")
    for step in range(1, warm_steps + rl_steps + 1):
        sink.log(step, warm_record(step, rng) if step <= warm_steps else rl_record(step - warm_steps, warm_steps, rng))
    sink.close()
    _lines(
        root / "evaluations.jsonl",
        [{"step": warm_steps + i, "reward/held_out": 0.3 + 0.015 * i} for i in range(0, rl_steps + 1, 10)],
    )
    _lines(root / "receipts.jsonl", [receipt(warm_steps + i, rng) for i in range(rl_steps + 1)])
    sample = {"prompt": "4 + 3 =", "response": "<b>7</b>", "answer": "7", "reward": 1.0}
    _lines(root / "samples.jsonl", [{"step": warm_steps + i} | sample for i in range(1, 4)])
    return root


def _lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def receipt(step: int, rng: random.Random) -> dict:
    return {
        "step": step,
        "policy_version": step,
        "tensors": 214,
        "bytes": 5_242_880,
        "digest": f"{rng.getrandbits(256):064x}",
        "seconds": 0.04,
        "passed": True,
    }


def warm_record(step: int, rng: random.Random) -> dict[str, float]:
    return {
        "phase": 0.0,
        "time": 1.5 * step,
        "sft/step": float(step),
        "sft/loss": 3 * math.exp(-step / 8) + rng.random() * 0.1,
        "grad_norm": 1.0,
        "learning_rate": 3e-3,
        "time/update": 0.9,
        "tokens/train": 900.0,
    }


def rl_record(i: int, warm_steps: int, rng: random.Random) -> dict[str, float]:
    noise = rng.random
    record = {
        "phase": 1.0,
        "time": 1.5 * warm_steps + 5.0 * i,
        "policy_version": float(warm_steps + i),
        "reward/mean": 0.3 + 0.012 * i + 0.1 * noise(),
        "reward/std": 0.4,
        "mismatch_kl": 4e-4 + 3e-4 * noise(),
        "train_rollout_logprob_abs_diff/mean": 0.01 + 0.002 * noise(),
        "train_rollout_logprob_abs_diff/max": 0.2 + 0.1 * noise(),
        "training/rollout_probs_diff_mean": 0.004,
        "training/rollout_probs_diff_max": 0.07 + 0.02 * noise(),
        "training/rollout_probs_diff_std": 0.006,
        "rollout_corr/rollout_is_mean": 1.0 + 0.01 * noise(),
        "rollout_corr/rollout_is_min": 0.8,
        "rollout_corr/rollout_is_max": 1.3,
        "rollout_corr/rollout_is_eff_sample_size": 0.99,
        "response_length/mean": 6 + 0.05 * i + noise(),
        "response_length/max": 16.0,
        "response/truncated_fraction": 0.1 * noise(),
        "entropy": 1.2 - 0.02 * i + 0.05 * noise(),
        "loss": 0.02 * (noise() - 0.5),
        "grad_norm": 0.5 + noise(),
        "clip_fraction/low": 0.01 * noise(),
        "clip_fraction/high": 0.02 * noise(),
        "ratio/mean": 1.0,
        "groups/degenerate": float(rng.randrange(8)),
        "groups/total": 16.0,
        "learning_rate": 1e-4,
        "tokens/rollout": 900.0,
        "tokens/train": 1800.0,
        "rollout/tokens_per_s": 500 + 100 * noise(),
        "train/tokens_per_s": 1500 + 100 * noise(),
        "time/rollout": 1.5 + noise(),
        "time/reward": 0.05,
        "time/old_log_probs": 0.6,
        "time/update": 1.2 + 0.3 * noise(),
        "time/sync": 0.1,
        "time/receipt": 0.08,
        "sync/bytes": 5e6,
        "sync/seconds": 0.1,
        "receipt/passed": 1.0,
        "receipt/tensors": 214.0,
        "skipped_steps": 0.0,
    }
    if i % 10 == 0:
        record["reward/held_out"] = 0.3 + 0.015 * i
        record["time/eval"] = 2.0
        for operand in OPERANDS:
            record |= {f"tiles/{operand}/{name}": 0.01 * noise() for name in TILE_STATISTICS}
    return record
