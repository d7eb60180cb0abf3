"""What ranks 1, 2, ... of ``e2e-fp8 train`` run instead of the command line; imports no engine before the environment is set."""

import os
import signal

import torch
import torch.distributed as dist

from e2e_fp8.orchestration.environment import prepare
from e2e_fp8.orchestration.ranks.meeting import leave, take_over


def follow() -> int:
    """Take rank 0's configuration and orders until it says stop; returns the exit status.

    When the job ends before its time this ends the process instead, with 2, or with 1 and a traceback where this rank has the bug.
    """
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
    except BaseException as error:
        leave(error, int(os.environ["RANK"]))
    dist.destroy_process_group()
    return 0
