#!/usr/bin/env python3
"""What a link gives: GB/s of the nccl transport's broadcasts between two GPUs by message size and number of blocks, beside a peer copy.

    benchmarks/link_rate.py [--ctas default 16 24 32] [--mib 16 64 256] [--total-mib 8192] [--rounds 5] [--backend cuda|cpu]

Each number of blocks (``NCCL_MIN_CTAS``; ``default`` is what ``sync.process_group`` asks for) is a pair of processes of its own, since NCCL
reads the environment once. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from e2e_fp8.sync.process_group import BroadcastGroup


def seconds_of(group: BroadcastGroup, message: torch.Tensor, count: int, rounds: int) -> float:
    """Median of ``rounds`` times ``count`` broadcasts back to back; the first round is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        with group.watched(lambda: None):
            for work in [group.broadcast(message) for _ in range(count)]:
                group.finish(work)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def take_part(args: argparse.Namespace) -> None:
    """One of the two processes; the sender prints message size to GB/s."""
    device = torch.device(args.backend, args.rank) if args.backend == "cuda" else torch.device("cpu")
    if args.rank == 0:
        port, join = BroadcastGroup.listen("127.0.0.1", 2, device=device, timeout_s=120)
        print(port, flush=True)
        group = join()
    else:
        group = BroadcastGroup.join("127.0.0.1", args.port, 1, 2, device=device, timeout_s=120)
    rates = {}
    for mib in args.mib:
        message = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
        count = max(1, args.total_mib // mib)
        rates[str(mib)] = (count * mib << 20) / seconds_of(group, message, count, args.rounds) / 1e9
    group.abort()
    if args.rank == 0:
        print(json.dumps(rates))


def rates_with(args: argparse.Namespace, ctas: str) -> dict[str, float]:
    """Message size in MiB to GB/s with one number of blocks."""
    environ = dict(os.environ) | ({} if ctas == "default" else {"NCCL_MIN_CTAS": ctas})
    sizes = [str(mib) for mib in args.mib]
    words = [sys.executable, __file__, "--backend", args.backend, "--total-mib", str(args.total_mib), "--rounds", str(args.rounds)]
    words += ["--mib", *sizes]
    sender = subprocess.Popen([*words, "--rank", "0"], env=environ, stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    port = sender.stdout.readline().strip()
    receiver = subprocess.Popen([*words, "--rank", "1", "--port", port], env=environ)
    told, _ = sender.communicate(timeout=300)
    if receiver.wait(timeout=60) or sender.returncode:
        raise RuntimeError(f"a process of the pair with {ctas} blocks failed")
    return json.loads(told)


def peer_copy(args: argparse.Namespace) -> float:
    """GB/s of a plain copy from GPU 0 to GPU 1."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    seconds = []
    for _ in range(args.rounds + 1):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - started)
    return 8 * source.nbytes / statistics.median(seconds[1:]) / 1e9


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctas", nargs="+", default=["default", "16", "24", "32"])
    parser.add_argument("--mib", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--total-mib", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        take_part(args)
        return
    result: dict[str, Any] = {"gb_per_s_by_ctas_and_mib": {ctas: rates_with(args, ctas) for ctas in args.ctas}}
    if args.backend == "cuda":
        result["peer_copy_gb_per_s"] = peer_copy(args)
        result["device"] = torch.cuda.get_device_name()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
