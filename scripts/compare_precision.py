#!/usr/bin/env python3
"""Mismatch KL of three precision arms, same seeds and data: BF16 + BF16, BF16 training + FP8 rollout, FP8 + FP8.

    scripts/compare_precision.py CONFIG.yaml --out DIR [--seeds 1 2] [--set a.b=c ...]

Each arm and seed is one ``e2e-fp8 train`` in its own process. Prints a Markdown table and writes DIR/comparison.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ARMS = {
    "BF16 train + BF16 rollout": ("bf16", "bf16"),
    "BF16 train + FP8 rollout": ("bf16", "fp8"),
    "FP8 train + FP8 rollout": ("fp8", "fp8"),
}


def run_arm(config: str, out: Path, training: str, rollout: str, seed: int, overrides: list[str]) -> list[dict[str, float]]:
    """Train one arm; returns its RL records."""
    name = f"train-{training}_rollout-{rollout}_seed-{seed}"
    command = [sys.executable, "-m", "e2e_fp8.cli.main", "train", config]
    for item in [
        *overrides,
        f"numerics.training_precision={training}",
        f"numerics.rollout_precision={rollout}",
        f"run.seed={seed}",
        f"run.name={name}",
        f"run.out_dir={out}",
        "run.checkpoint_interval=0",
    ]:
        command += ["--set", item]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "mismatch_kl" in r]


def summarize(by_seed: list[list[dict[str, float]]]) -> dict[str, float]:
    """Figures of one arm over seeds."""
    means = [statistics.fmean(r["mismatch_kl"] for r in records) for records in by_seed]
    flat = [r for records in by_seed for r in records]
    return {
        "mismatch_kl_mean": statistics.fmean(means),
        "mismatch_kl_seed_std": statistics.stdev(means) if len(means) > 1 else 0.0,
        "mismatch_kl_max_step": max(r["mismatch_kl"] for r in flat),
        "abs_logprob_diff_mean": statistics.fmean(r["train_rollout_logprob_abs_diff/mean"] for r in flat),
        "reward_first5": statistics.fmean(r["reward/mean"] for records in by_seed for r in records[:5]),
        "reward_last5": statistics.fmean(r["reward/mean"] for records in by_seed for r in records[-5:]),
        "steps": float(len(by_seed[0])),
        "seeds": float(len(by_seed)),
    }


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    table = {}
    for arm, (training, rollout) in ARMS.items():
        table[arm] = summarize([run_arm(args.config, args.out, training, rollout, seed, args.overrides) for seed in args.seeds])
    (args.out / "comparison.json").write_text(json.dumps(table, indent=2) + "\n")
    print("| arm | mismatch KL (k3), mean | spread over seeds | worst step | mean abs log-prob difference | reward first 5 -> last 5 |")
    print("|---|---|---|---|---|---|")
    for arm, row in table.items():
        print(
            f"| {arm} | {row['mismatch_kl_mean']:.2e} | {row['mismatch_kl_seed_std']:.1e} | {row['mismatch_kl_max_step']:.2e} "
            f"| {row['abs_logprob_diff_mean']:.2e} | {row['reward_first5']:.3f} -> {row['reward_last5']:.3f} |"
        )


if __name__ == "__main__":
    main()
