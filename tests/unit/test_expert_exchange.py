"""Rows of experts between real gloo ranks: also of a rank that has none, and of one that gets none."""

import os
import subprocess
import sys
from pathlib import Path

import torch

PROCESS = Path(__file__).with_name("exchange_process.py")


def test_rows_reach_their_experts_and_come_back_with_their_gradients(tmp_path):
    command = [sys.executable, str(PROCESS), str(tmp_path), str(torch.initial_seed() % 2**31)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
