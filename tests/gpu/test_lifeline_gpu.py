"""Trainer ranks that wait for another in a collective over NCCL end with a sentence, not with torch's abort."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from gpus import places
from rank_cases import free_port
from tiny_runs import ROOT, python_path

PROCESS = Path(__file__).with_name("lifeline_process.py")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("fate", "statuses", "sentence"),
    [
        ("late", [2, 2], "Rank 0 of the trainer waits for others in vain (NCCL, "),
        ("dead", [2, 9], "Rank 1 of the trainer is gone: its process ended without a word"),
    ],
)
def test_a_rank_that_waits_for_another_says_so_and_ends(fate, statuses, sentence):
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": python_path(ROOT)}
    environ = os.environ | own | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    began, ranks = time.monotonic(), []
    for rank, place in enumerate(places(2)):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(place.gpu)} | place.environ
        words = [sys.executable, PROCESS, fate]
        ranks.append(subprocess.Popen(words, env=environ | numbers, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == statuses, told
    assert sentence in "".join(err for _, err in told)
    assert "last wish" in told[0][0]
    assert time.monotonic() - began < 100
