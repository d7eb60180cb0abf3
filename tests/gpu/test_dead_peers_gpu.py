"""A peer that dies in an update over NCCL: before the ends are connected, and while the other one packs or unpacks for the first time."""

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.dead_peers import ENDS, check_dead_peer

from e2e_fp8.sync.process_group import BroadcastGroup

pytestmark = pytest.mark.gpu
TOLD = {"sender": "EngineError: The trainer died while it sent weights", "receiver": "EngineError: The rollout server is gone."}


@pytest.mark.parametrize("victim", ENDS)
def test_an_update_ends_when_one_end_of_it_dies_before_they_are_connected(tmp_path, victim):
    check_dead_peer(tmp_path, victim, 1, on_gpus=True, whole_bytes=1 << 20, told=TOLD[victim])


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("victim", ENDS)
def test_an_update_ends_when_one_end_of_it_dies(tmp_path, victim, hosts):
    """Within a host NCCL does not notice it; between two it does, and torch's watchdog would end the other one, too."""
    if hosts == 1 and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks of one host on one GPU")
    # more than NCCL takes in without a receiver
    check_dead_peer(tmp_path, victim, 3, on_gpus=True, hosts=hosts > 1, whole_bytes=256 << 20, told=TOLD[victim])


class Recorded:
    """A process group whose broadcasts are written down: elements, stream and thread of each."""

    def __init__(self, group) -> None:
        self.group, self.calls = group, []

    def broadcast(self, tensors, options):
        self.calls.append((tensors[0].numel(), torch.cuda.current_stream().cuda_stream, threading.get_ident()))
        return self.group.broadcast(tensors, options)

    def abort(self) -> None:
        self.group.abort()


def test_ends_greet_each_other_in_a_thread_and_messages_are_the_callers():
    """In a group of one, which one GPU has room for."""
    device = torch.device("cuda", 0)
    _, join = BroadcastGroup.listen("127.0.0.1", 1, device=device, timeout_s=60)
    group, message = join(), torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    recorded = group._group = Recorded(group._group)
    with torch.cuda.stream(torch.cuda.Stream()), group.watched(lambda: None):
        own = message.numel(), torch.cuda.current_stream().cuda_stream, threading.get_ident()
        for _ in range(3):
            group.finish(group.broadcast(message))
    (elements, _, thread), *rest = recorded.calls
    assert (elements, rest) == (1, [own] * 3)
    assert thread != own[2]
    group.abort()
