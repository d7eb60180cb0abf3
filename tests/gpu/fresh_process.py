"""Scripts of the trainer's tests, each in a fresh process, because Transformer Engine reads the scale kind when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

UNIT = Path(__file__).resolve().parents[1] / "unit"


def run_fresh(script: str, *words: str, fp32_scales: bool = True) -> str:
    """What ``script`` prints, whose last line has to begin with ``ok``; it may import what tests/unit has (training_cases)."""
    environment = {
        **os.environ,
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": str(int(fp32_scales)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(UNIT), os.environ.get("PYTHONPATH", "")])),
    }
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("ok"), done.stdout[-2000:]
    return done.stdout
