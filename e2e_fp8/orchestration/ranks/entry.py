"""What ranks 1, 2, ... of ``e2e-fp8 train`` run instead of the command line; imports no engine before the environment is set."""

import signal
import sys

import torch
import torch.distributed as dist

from e2e_fp8.errors import UserError
from e2e_fp8.orchestration.environment import prepare
from e2e_fp8.orchestration.ranks.meeting import is_first_to_tell, take_over


def follow() -> int:
    """Take rank 0's configuration and orders until it says stop; returns the exit status, 2 when the job ends before its time."""
    # a handler of Python's would wait until torch's native code returns
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        cfg = prepare(take_over())
        if cfg.run.threads:
            torch.set_num_threads(cfg.run.threads)
        from e2e_fp8.orchestration.ranks.follower import Follower

        follower = Follower(cfg)
        # Rank 0 decides what an interrupt means. A rank whose peers are gone ends by itself.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follower.follow()
    except UserError as error:
        if is_first_to_tell():
            print(f"e2e-fp8: {error}", file=sys.stderr, flush=True)
        return 2
    dist.destroy_process_group()
    return 0
