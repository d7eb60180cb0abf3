"""Router replay on a Hopper GPU: vLLM's routing and gate weights in a Transformer Engine trainer, through the CPU test's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parents[1] / "integration" / "replay_process.py"


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("replay")
    environment = {**os.environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(out), "cuda"], capture_output=True, text=True, timeout=590, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out / "result.pt", weights_only=False)


def test_recorded_experts_and_weights_are_those_of_their_own_token(result):
    same = total = 0
    for sample in result["samples"]:
        ids, weights = torch.from_numpy(sample["routed_experts"].astype("int64")), sample["routed_weights"]
        assert ids.shape == weights.shape
        assert abs(weights.sum(axis=2) - 1).max() <= 8 * 2**-23
        agree = (ids.sort(dim=2).values == sample["own"][: len(ids)].sort(dim=2).values).all(dim=2)
        same, total = same + int(agree.sum()), total + agree.numel()
    assert same > 0.9 * total


def test_everything_is_covered_and_the_loop_runs(result):
    assert result["coverage"]["router_replay/coverage"] == 1.0
    assert result["coverage"]["router_replay/preempted_samples"] > 0
    for record in result["steps"]:
        assert record["router_replay/coverage"] == 1.0
        assert record["receipt/passed"] == 1.0
        assert record["mismatch_kl"] < 0.05
