"""Updates announced ahead of time into real servers: every check over every transport that can, and two engine ranks."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration import armed_cases
from integration.server_cases import Served, case_config
from integration.tiny_runs import run

TRANSPORTS = ("ipc without buckets", "nccl")
pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]
TWO_RANKS = {"num_key_value_heads": 2, "num_attention_heads": 4, "moe_intermediate_size": 256}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(case_config(), tmp_path_factory.mktemp("served"))
    yield served
    served.process.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    served = Served(case_config("qwen3_moe", tensor_parallel=2, **TWO_RANKS), tmp_path_factory.mktemp("two_ranks"))
    yield served
    served.process.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("check", armed_cases.CHECKS)
def test_one_rank(served, check, transport):
    check(served, transport, 10)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("check", armed_cases.CHECKS)
def test_two_ranks(two_ranks, check, transport):
    check(two_ranks, transport, 10)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_fails(served, transport, monkeypatch):
    armed_cases.check_failure(served, transport, 10, monkeypatch)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("check", [armed_cases.check_killed_while_armed, armed_cases.check_killed_after_its_word])
def test_a_trainer_is_killed(served, check, transport):
    check(served, transport, 10)


def test_the_loop_announces_its_syncs_and_takes_back_what_fails(tmp_path):
    """The first step's set is not settled yet."""
    done = run([sys.executable, str(Path(__file__).with_name("armed_loop_process.py")), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failed"]
    assert result["after"] == result["before"]
    assert result["versions"] == [result["version"]]
    assert result["armed"] == [0.0, 1.0, 1.0, 1.0]
    assert result["receipts"] == [1.0] * 4


def test_the_engine_alone_is_killed(served):
    """Last of this server."""
    armed_cases.check_engine_killed_while_armed(served, "ipc without buckets", 10)


def test_the_server_is_killed(two_ranks):
    """Last in the file."""
    armed_cases.check_server_killed_while_armed(two_ranks, "ipc without buckets", 10)
