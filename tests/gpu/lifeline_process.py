"""One of two trainer ranks that have a lifeline: rank 0 waits in a collective over NCCL, rank 1 stays away or dies, as FATE says.

Usage: ``python lifeline_process.py {late|dead}``, with a launcher's environment. A collective may take eight seconds.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from e2e_fp8.orchestration.ranks.lifeline import Lifeline


def main(fate: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=8))
    lifeline = Lifeline(dist.new_group(backend="gloo", timeout=timedelta(days=30)))
    lifeline.last_wish = lambda: print("last wish", flush=True)
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(values)
        torch.cuda.synchronize()
    elif fate == "dead":
        os._exit(9)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
