"""Over gloo; ``tests/gpu/test_dead_peers_gpu.py`` has NCCL."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.dead_peers import ENDS, check_dead_peer

TOLD = {"sender": "Connection closed by peer", "receiver": "The rollout server is gone."}


@pytest.mark.parametrize("message", [1, 3])
@pytest.mark.parametrize("victim", ENDS)
def test_an_update_ends_when_one_end_of_it_dies(tmp_path, victim, message):
    check_dead_peer(tmp_path, victim, message, whole_bytes=1 << 20, told=TOLD[victim])
