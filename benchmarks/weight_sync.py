#!/usr/bin/env python3
"""Seconds and bytes of one weight sync, over the time of a plain copy of the same bytes on the same device.

benchmarks/weight_sync.py CONFIG.yaml [--rounds 10] [--set a.b=c ...]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from e2e_fp8.config.load import load_config
from e2e_fp8.orchestration.environment import prepare


def timed(function, device, rounds: int) -> list[float]:
    """Wall seconds of ``rounds`` calls, device idle before and after each."""
    import torch

    seconds = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    cfg = prepare(load_config(Path(args.config), args.overrides))
    # the environment must be set before these import the engines
    import torch

    from e2e_fp8.numerics.digest import tensor_digests
    from e2e_fp8.orchestration.session import open_session
    from e2e_fp8.orchestration.weight_sync import exported_tensors

    with tempfile.TemporaryDirectory() as scratch:
        session = open_session(cfg, Path(scratch) / "model")
        session.sync().settled()
        reports = [session.sync().settled() for _ in range(args.rounds)]
        source = [entry.tensor for entry in exported_tensors(session.trainer, session.cfg)]
        target = [torch.empty_like(t) for t in source]
        num_bytes = sum(t.numel() * t.element_size() for t in source)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=source[0].device)
        destination = torch.empty_like(flat)
        device = session.trainer.device
        per_tensor = timed(lambda: [t.copy_(s) for t, s in zip(target, source, strict=True)], device, args.rounds)
        digests = timed(lambda: tensor_digests(source), device, args.rounds)
        one_copy = timed(lambda: destination.copy_(flat), device, args.rounds)
        session.close()
    median = statistics.median
    sync = median(r.seconds for r in reports)
    print(
        json.dumps(
            {
                "config": args.config,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "rounds": args.rounds,
                "tensors": len(source),
                "bytes": num_bytes,
                "sync_seconds_median": sync,
                "sync_seconds_min": min(r.seconds for r in reports),
                "receipt_seconds_median": median(r.receipt_seconds for r in reports),
                "receipt_share_of_sync_median": median(r.receipt_metrics.get("receipt/share_of_sync", 0.0) for r in reports),
                "receipt_gb_per_s_median": median(r.receipt_metrics.get("receipt/gb_per_s", 0.0) for r in reports),
                "digest_seconds_median": median(digests),
                "digest_gb_per_s_median": num_bytes / median(digests) / 1e9,
                "copy_per_tensor_seconds_median": median(per_tensor),
                "copy_flat_seconds_median": median(one_copy),
                "sync_over_copy_per_tensor": sync / median(per_tensor),
                "sync_over_copy_flat": sync / median(one_copy),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
