"""Either side killed on the way into a server on a GPU: the old version serves, or a refusal does, and a retry passes.

Over ``ipc`` the engine reads the trainer's memory in one message, so that the trainer has no half way.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, case_config
from integration.torn_cases import PHASES, check_server_killed, check_trainer_killed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TWO_GPUS = torch.cuda.device_count() >= 2


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """On GPU 1 where there are two; it sees the trainer's GPU 0 too, whose memory ``ipc`` reads."""
    served = Served(case_config(device="cuda"), tmp_path_factory.mktemp("served"), devices="1,0" if TWO_GPUS else None)
    yield served
    served.process.close()


def needs_gpus(transport: str) -> None:
    """``nccl`` and ``ranks`` refuse two processes on one GPU."""
    if transport in ("nccl", "ranks") and not TWO_GPUS:
        pytest.skip("needs two GPUs: a trainer and an engine")


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
    needs_gpus(transport)
    check_trainer_killed(served, transport, phase, version)


@pytest.mark.parametrize(
    ("transport", "phase", "version"),
    [
        pytest.param(name, phase, version, marks=pytest.mark.xdist_group(f"server_killed_{name}"))
        for name, phase, version in (("ranks", "halfway", 300), ("nccl", "halfway", 400), ("ipc", "receipt", 500))
    ],
)
def test_server_killed(served, transport, phase, version):
    needs_gpus(transport)
    check_server_killed(served, transport, phase, version)
