"""Tool use in turns, with a real trainer and a real engine in a process of their own."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from e2e_fp8.tasks.tools import calculator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("episodes")
    script = Path(__file__).with_name("episode_process.py")
    done = subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "result.json").read_text())


def test_episodes_call_the_tool_and_go_on(result) -> None:
    turns = [s for s in result["first"] if s["mask"] and not all(s["mask"])]
    assert len(turns) > len(result["first"]) / 2
    for sample in result["first"]:
        assert len(sample["response"]) == len(sample["log_probs"]) == len(sample["mask"] or sample["response"])
        assert len(sample["prompt"]) + len(sample["response"]) <= result["longest"]
    for sample, text in zip(result["first"], result["decoded"], strict=True):
        if sample["mask"] and not all(sample["mask"]):
            call = text.split("<tool>calculator:", 1)[1].split("</tool>")[0]
            try:
                expected = f"</tool><result>{calculator(call.strip())}</result>"
            except (ValueError, ZeroDivisionError):
                expected = "</tool><result>error"
            assert expected in text


def test_episodes_are_a_function_of_weights_and_seed(result) -> None:
    assert result["first"] == result["again"]


def test_trained_tokens_have_the_log_probs_of_the_trainer_and_tool_tokens_none(result) -> None:
    differences = []
    for sample, trainer in zip(result["first"], result["trainer"], strict=True):
        mask = sample["mask"] or [True] * len(sample["response"])
        assert all(p == 0.0 for p, m in zip(sample["log_probs"], mask, strict=True) if not m)
        engine = [p for p, m in zip(sample["log_probs"], mask, strict=True) if m]
        assert len(engine) == len(trainer)
        differences += [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
    assert math.fsum(differences) / len(differences) < 0.05
