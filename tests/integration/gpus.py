"""Which GPU each process of a test has, so that one GPU is enough for tests of several.

Where there are fewer than processes, all have GPU 0 and each is a host of its own for NCCL, which then sends through sockets and
refuses nothing: the messages, kernels and aborts are real, their speed is not that of a link.
"""

from dataclasses import dataclass, field

import torch

TRAINER, ENGINE = range(2)


@dataclass(frozen=True)
class Place:
    """Of one process: its GPU, and what it needs in its environment."""

    gpu: int
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def server_environ(self) -> dict[str, str]:
        """Of a server there. It sees the trainer's GPU, too, whose memory ``ipc`` reads."""
        return self.environ | ({} if self.gpu == TRAINER else {"CUDA_VISIBLE_DEVICES": f"{self.gpu},{TRAINER}"})


def places(count: int, *, hosts: bool = False) -> list[Place]:
    """For processes that are ranks of one NCCL group; ``hosts``: each a host of its own in any case, where NCCL notices a dead peer."""
    alone = torch.cuda.device_count() >= count
    return [Place(index if alone else 0, {"NCCL_HOSTID": f"host-{index}"} if hosts or not alone else {}) for index in range(count)]
