"""The rollout engine on a Hopper GPU: delivered bytes stay as they are, and log-probs agree with the slow reference."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.qwen3_reference import compare_samples

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).resolve().parents[1]
TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=[("qwen3_moe", "fp8"), ("qwen3", "fp8"), ("qwen3_moe", "bf16")], ids="-".join)
def run(request, tmp_path_factory) -> dict:
    """What the engine process recorded, for one model."""
    out = tmp_path_factory.mktemp("engine")
    command = [sys.executable, str(TESTS / "unit" / "rollout_engine_process.py"), *request.param, "fp32", "mixed", "cuda", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out / "result.pt", weights_only=False) | {"precision": request.param[1]}


@pytest.mark.parametrize(
    ("live", "delivered"), [("live_first", "first"), ("live_second", "second"), ("live_retried", "second"), ("live_disk", "first")]
)
def test_live_bytes_are_the_delivered_bytes(run, live, delivered):
    # Where the update is a copy in place, BF16 tensors are read back too.
    assert set(run[live]) == (set(run[delivered]) if run["precision"] == "fp8" else set())
    for name, tensor in run[live].items():
        assert torch.equal(tensor.view(torch.uint8), run[delivered][name].view(torch.uint8)), name


def test_samples_follow_the_weights(run):
    first, second, disk = (
        [(s["response_token_ids"], s["policy_version"]) for s in run[f"samples_{key}"]] for key in ("first", "second", "disk")
    )
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in disk]
    assert [tokens for tokens, _ in first] != [tokens for tokens, _ in second]
    assert {version for _, version in first + second + disk} == {1, 2, 4}


def test_log_probs_and_routing_agree_with_reference(run):
    difference, routed, total = compare_samples(run["config"], run["first"], run["samples_first"], TEMPERATURE)
    assert difference.abs().mean() < 0.08
    assert difference.mean().abs() < 0.02
    assert routed >= 0.95 * total


def test_refusals_name_the_cause(run):
    assert run["missing"].startswith("EngineError: Weight update refused, nothing was written")
    assert run["too_long"].startswith("DataError: Prompt 'too-long'")
    assert "wedged: generation of 4 x 4 samples" in run["wedged"]


def test_a_torn_update_is_refused_until_a_whole_one_came(run):
    assert run["torn"].startswith("EngineError: The weight update to policy version 3 stopped half-way")
    assert run["after_torn"].endswith("repeat the update.")
    second, retried = ([s["response_token_ids"] for s in run[f"samples_{key}"]] for key in ("second", "retried"))
    assert second == retried
