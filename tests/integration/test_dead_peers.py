"""Over gloo; ``tests/gpu/test_dead_peers_gpu.py`` has NCCL."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.dead_peers import ENDS, check_dead_peer


@pytest.mark.parametrize(("victim", "told"), list(zip(ENDS, ("Connection closed by peer", "The rollout server is gone."), strict=True)))
def test_an_update_ends_when_one_end_of_it_dies(tmp_path, victim, told):
    check_dead_peer(tmp_path, victim, devices=dict.fromkeys(ENDS, "cpu"), whole_bytes=1 << 20, told=told)
