"""Either side killed on the way into a server on a GPU: the old version serves, or a refusal does, and a retry passes.

Over ``ipc`` the engine reads the trainer's memory in one message, so that the trainer has no half way.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.gpus import ENGINE, places
from integration.server_cases import Served, case_config
from integration.torn_cases import PHASES, check_server_killed, check_trainer_killed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """On GPU 1 where there are two; else another host for NCCL, which then notices who died, and has to end nobody else."""
    served = Served(case_config(device="cuda"), tmp_path_factory.mktemp("served"), environ=places(2)[ENGINE].server_environ)
    yield served
    served.process.close()


@pytest.mark.xdist_group("trainer_killed")
@pytest.mark.parametrize(
    ("transport", "phase", "version"),
    [
        *(("ranks", phase, 10 * i) for i, phase in enumerate(PHASES)),
        ("nccl", "halfway", 100),
        *(("ipc", phase, 200 + 10 * i) for i, phase in enumerate(PHASES) if phase != "halfway"),
    ],
)
def test_trainer_killed(served, transport, phase, version):
    check_trainer_killed(served, transport, phase, version)


@pytest.mark.parametrize(
    ("transport", "phase", "version"),
    [
        pytest.param(name, phase, version, marks=pytest.mark.xdist_group(f"server_killed_{name}"))
        for name, phase, version in (("ranks", "halfway", 300), ("nccl", "halfway", 400), ("ipc", "receipt", 500))
    ],
)
def test_server_killed(served, transport, phase, version):
    check_server_killed(served, transport, phase, version)
