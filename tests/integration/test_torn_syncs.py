"""Either side killed at each phase of an update, over every transport: the old version serves, or a refusal does, and a retry passes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, case_config
from integration.torn_cases import PHASES, check_server_killed, check_trainer_killed

TRANSPORTS = ("ipc", "nccl", "disk", "ranks")
pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]
EVERYWHERE = [(transport, phase, index) for index, (transport, phase) in enumerate((t, p) for t in TRANSPORTS for p in PHASES)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(case_config(), tmp_path_factory.mktemp("served"))
    yield served
    served.process.close()


@pytest.mark.parametrize(("transport", "phase", "index"), EVERYWHERE)
def test_trainer_killed(served, transport, phase, index):
    check_trainer_killed(served, transport, phase, 10 + 10 * index)


@pytest.mark.parametrize(("transport", "phase", "index"), EVERYWHERE)
def test_server_killed(served, transport, phase, index):
    """Each replaces the module's server."""
    check_server_killed(served, transport, phase, 1000 + 10 * index)
