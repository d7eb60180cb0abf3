"""Either side of a weight update killed at each phase: what the tests of every transport and device check."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, assert_live, generate, random_weights, start_server

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.channels import policy_folder
from e2e_fp8.sync.http_client import ServerClient

PHASES = ("open", "halfway", "receipt", "resume")
"""See publisher_process.py."""
SEEDS = (11, 12)
"""Of the weights before and after."""


def weights_of(served: Served, seed: int) -> dict[str, torch.Tensor]:
    """Random weights on the trainer's device."""
    return {name: tensor.to(served.device) for name, tensor in random_weights(served.cfg, seed).items()}


def kill(served: Served, trainer: subprocess.Popen) -> None:
    """SIGKILL a trainer that waits at a phase."""
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    (served.root / "hold").unlink()


def await_torn(served: Served) -> None:
    """Until the server is in the update of a trainer that is halfway; over ``nccl`` the announcement may come after the first messages."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            generate(served.client)
        except EngineError as error:
            if "halfway" in str(error):
                return
            if "(503): Generation refused" not in str(error):
                raise
        time.sleep(0.02)
    raise AssertionError("no update began")


def check_trainer_killed(served: Served, transport: str, phase: str, version: int) -> None:
    """Nothing written: the old version serves. Partly: a refusal. All of it: a refusal until somebody publishes. Then a retry, twice."""
    old, new = (weights_of(served, seed) for seed in SEEDS)
    served.publish(transport, old, version)
    before = generate(served.client)
    begins = phase == "halfway" and transport != "disk"
    trainer = served.start_trainer(transport, SEEDS[1], version + 1, phase)
    if begins:
        await_torn(served)
    kill(served, trainer)
    if phase == "open" or (transport, phase) == ("disk", "halfway"):
        assert served.versions() == [version]
        assert generate(served.client) == before
        assert_live(served, on_cpu(old))
    else:
        with pytest.raises(EngineError, match=r"\(503\): Generation refused: " + (".* halfway" if begins else "")):
            generate(served.client)
    if phase in ("receipt", "resume"):
        assert served.versions() == [version + 1]
        assert_live(served, on_cpu(new))
    elif begins:
        assert served.versions() == [None]
        with pytest.raises(EngineError, match=rf"\(409\): Cannot resume: .*version {version + 1} began and has not finished"):
            served.client.post("/resume")
    for again in (version + 1, version + 2):
        served.publish(transport, new, again)
        assert served.versions() == [again]
        assert_live(served, on_cpu(new))
    generate(served.client)


def kill_server(served: Served, transport: str, phase: str, seed: int, version: int) -> None:
    """SIGKILL the server and all its workers while a trainer is at ``phase``: one sentence there, after what NCCL says between hosts."""
    trainer = served.start_trainer(transport, seed, version, phase)
    os.killpg(served.process.pid, signal.SIGKILL)
    (served.root / "hold").unlink()
    _, told = trainer.communicate(timeout=120)
    assert trainer.returncode == 2, told
    *before, sentence = told.splitlines()
    assert sentence.startswith("EngineError: "), told
    assert "Traceback" not in told
    assert not before or "NCCL error: remote process exited" in told, told


def check_server_killed(served: Served, transport: str, phase: str, version: int) -> None:
    """A server that starts from the last checkpoint afterwards has its version and takes the next one."""
    old, new = (weights_of(served, seed) for seed in SEEDS)
    served.publish("disk", new, version)
    expected = generate(served.client)
    kill_server(served, transport, phase, SEEDS[0], version + 1)
    served.process.close()
    folder = policy_folder(served.root / "sync", version)
    served.process = start_server(served.cfg, folder, served.root / "server", load_format="auto", **served.options)
    served.client = ServerClient(served.process.url, served.process.token, timeout_s=60)
    assert served.versions() == [version]
    assert generate(served.client) == expected
    assert_live(served, on_cpu(new))
    served.publish(transport, old, version + 1)
    assert_live(served, on_cpu(old))


def on_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in weights.items()}
