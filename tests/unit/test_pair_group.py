"""Ranks of a weight transfer that wait for one which will never send."""

import gc
import os
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.process_group import PairGroup


@pytest.fixture
def pair():
    options = {"device": torch.device("cpu"), "timeout_s": 60.0}
    port, join = PairGroup.listen("127.0.0.1", 2, **options)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(PairGroup.join, "127.0.0.1", port, 1, 2, **options)
        trainer = join()
        yield trainer, waiting.result()


def test_while_all_go_on_nobody_is_disturbed(pair):
    for group in pair:
        group.check_peers()
    message = torch.randint(256, (77,), dtype=torch.uint8)
    found = torch.empty_like(message)
    arrived = pair[1].receive(found, 0)
    pair[0].send(message, 1)()
    arrived()
    assert torch.equal(found, message)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_gives_up_ends_the_others_wait(pair, gone):
    pair[gone].give_up()
    with pytest.raises(EngineError, match="Another rank gave the weight transfer up, see its message"):
        pair[1 - gone].check_peers()


def test_what_a_rank_watches_ends_its_wait(pair):
    def fail() -> None:
        raise EngineError("the server says no")

    pair[0].also = fail
    with pytest.raises(EngineError, match="the server says no"):
        pair[0].check_peers()
    pair[1].check_peers()


def test_a_group_that_is_dropped_closes_its_rendezvous():
    """Others who wait there are told by that, and no collector has to come by."""
    options = {"device": torch.device("cpu"), "timeout_s": 20.0}
    port, join = PairGroup.listen("127.0.0.1", 2, **options)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(PairGroup.join, "127.0.0.1", port, 1, 2, **options)
        group, kept = join(), waiting.result()
    del join, waiting
    dropped = weakref.ref(group)
    gc.disable()
    try:
        group.give_up()
        del group
        assert dropped() is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        gc.enable()
    del kept


TRAINER = """
import sys, time
import torch
from e2e_fp8.sync.process_group import PairGroup
port, join = PairGroup.listen("127.0.0.1", 2, device=torch.device("cpu"), timeout_s=60.0)
print(port, flush=True)
group = join()
print("joined", flush=True)
time.sleep(600)
"""


def test_who_waits_for_ranks_that_do_not_come_looks_at_something_else_meanwhile():
    _, join = PairGroup.listen("127.0.0.1", 2, device=torch.device("cpu"), timeout_s=60.0)

    def fail() -> None:
        raise EngineError("the server is gone")

    with pytest.raises(EngineError, match="the server is gone"):
        join(fail)
    _, join = PairGroup.listen("127.0.0.1", 2, device=torch.device("cpu"), timeout_s=0.1)
    with pytest.raises(RuntimeError, match=r"not all of 2 ranks came within 0\.1 s"):
        join()


def test_a_trainer_that_was_killed_ends_the_wait_at_once():
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        group = PairGroup.join("127.0.0.1", int(trainer.stdout.readline()), 1, 2, device=torch.device("cpu"), timeout_s=60.0)
        assert trainer.stdout.readline() == "joined\n"
        group.check_peers()
        trainer.kill()
        trainer.wait()
        began = time.monotonic()
        with pytest.raises(EngineError, match="The trainer died while it sent weights"):
            group.check_peers()
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("before", [None, "0"])
def test_torchs_watchdog_is_left_out_of_a_group_over_nccl_and_of_no_other(before, monkeypatch):
    """What a broken message does to a process that has one, the GPU tests of killed peers show."""
    name, at_making = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)

    class Made(ProcessGroupNCCL):
        def __init__(self, *given) -> None:
            at_making.append(os.environ.get(name))
            super().__init__(*given)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store, device = HashStore(), torch.device("cuda", 0)
    # on a machine without a GPU torch refuses to make one
    with suppress(ValueError):
        PairGroup(store, 0, 1, device=device, host="127.0.0.1", timeout_s=5.0)  # pyright: ignore[reportArgumentType]
    assert (at_making, os.environ.get(name)) == (["1"], before)
