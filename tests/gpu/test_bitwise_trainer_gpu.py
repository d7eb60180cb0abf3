"""The trainer with ``numerics.alignment: bitwise`` on a Hopper GPU: rows, steps, gradients, single causes, experts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "bitwise_trainer_process.py"


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("check", ["rows", "steps", "gradients", "causes", "experts"])
def test_trainer(check, architecture):
    if check == "experts" and architecture == "qwen3":
        pytest.skip("a dense model has none")
    environment = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, str(SCRIPT), check, architecture]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.split()[-1] == "ok"
