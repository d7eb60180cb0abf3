"""Two gloo ranks exchange rows of experts; exit status 0 when every row went to its expert and came back.

Usage: ``python exchange_process.py FOLDER SEED``
"""

import os
import sys
import traceback

import torch
import torch.distributed as dist

from e2e_fp8.training.expert_exchange import ExpertExchange
from megatron_patches.cpu_device import megatron_on_cpu

RANKS, LOCAL, WIDTH = 2, 3, 5
EXPERTS = RANKS * LOCAL


def assignments(rank: int, case: str, generator: torch.Generator) -> torch.Tensor:
    """Sorted experts of a rank's rows."""
    counts = {"random": (11, 4), "nothing_here": (0, 7), "one_side": (6, 5)}[case]
    highest = LOCAL if case == "one_side" else EXPERTS
    return [torch.randint(0, highest, (n,), generator=generator).sort().values for n in counts][rank]


def check(rank: int, case: str, seed: int) -> None:
    everyone = [assignments(r, case, torch.Generator().manual_seed(seed)) for r in range(RANKS)]
    # a row says where it is from: rank, place, expert
    rows = [
        torch.tensor([[100.0 * r + i, e.item(), *[0.5 * i] * (WIDTH - 2)] for i, e in enumerate(experts)]).view(-1, WIDTH)
        for r, experts in enumerate(everyone)
    ]
    mine = rows[rank].clone().requires_grad_()
    exchange = ExpertExchange(dist.group.WORLD, torch.bincount(everyone[rank], minlength=EXPERTS))
    received = exchange.there(mine)
    own = range(rank * LOCAL, (rank + 1) * LOCAL)
    expected = [row for e in own for r in range(RANKS) for row in rows[r] if row[1] == e]
    assert torch.equal(received.detach(), torch.stack(expected) if expected else torch.empty(0, WIDTH)), (case, "there")
    assert exchange.counts == [sum(int((experts == e).sum()) for experts in everyone) for e in own]
    # the expert's number marks the gradient, as its weights would
    returned = exchange.back(received * (received[:, 1:2].detach() + 2))
    assert torch.equal(returned.detach(), rows[rank] * (rows[rank][:, 1:2] + 2)), (case, "back")
    returned.sum().backward()
    assert torch.equal(mine.grad, (rows[rank][:, 1:2] + 2).expand(-1, WIDTH)), (case, "gradient")


def main(folder: str, seed: int) -> int:
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
                with megatron_on_cpu():
                    for case in ("random", "nothing_here", "one_side"):
                        check(rank, case, seed)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
