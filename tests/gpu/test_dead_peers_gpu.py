"""A peer that dies in the middle of an update, over NCCL, while the other end packs or unpacks for the first time."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.dead_peers import ENDS, check_dead_peer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")]


@pytest.mark.parametrize(
    ("victim", "told"),
    list(zip(ENDS, ("EngineError: The trainer died while it sent weights", "EngineError: The rollout server is gone."), strict=True)),
)
def test_an_update_ends_when_one_end_of_it_dies(tmp_path, victim, told):
    # more than NCCL takes in without a receiver
    check_dead_peer(tmp_path, victim, devices={"sender": "cuda:0", "receiver": "cuda:1"}, whole_bytes=256 << 20, told=told)
