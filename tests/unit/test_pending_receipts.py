"""A comparison that goes on after ``publish``: waited for, told once, and no reason to hang. The server is a real one, without vLLM."""

import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from json_server import JsonHandler, serving

from e2e_fp8.errors import ByteMismatchError, EngineError
from e2e_fp8.sync import publisher as publisher_module
from e2e_fp8.sync.background import Background
from e2e_fp8.sync.publish_report import PendingReceipt, PublishReport
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.sync.receipt import manifest_of


class Workers(JsonHandler):
    def answer(self, body: Any) -> Any:
        if self.path == "/hangs":
            time.sleep(3)
        return {"results": [{}]}


@pytest.fixture
def publisher(tmp_path: Path):
    with serving(Workers) as url:
        cpu = torch.device("cpu")
        publisher = WeightPublisher(url, "t", transport="disk", device=cpu, folder=tmp_path, write_folder=lambda *_: None)
        yield publisher
        publisher.close()


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, whatever the tests' own process inherited: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def report_of(pending: PendingReceipt) -> PublishReport:
    return PublishReport(policy_version=1, num_bytes=1, seconds=1.0, receipt_seconds=0.0, receipt=None, phases={}, pending=pending)


@pytest.mark.parametrize("told_by", ["settle", "settled"])
@pytest.mark.parametrize("error", [ByteMismatchError("bytes differ"), KeyError("table")])
def test_an_error_is_told_once_and_not_lost_with_an_interrupt(publisher, interruptible, error, told_by):
    future: Future = Future()
    pending = publisher._pending = PendingReceipt(future)
    wait = publisher.settle if told_by == "settle" else report_of(pending).settled
    threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    future.set_exception(error)
    with pytest.raises(type(error)):
        wait()
    publisher.settle()
    publisher.settle()


def test_what_publish_itself_waited_for_was_waited_for():
    manifest, future = manifest_of([]), Future()
    future.set_result((manifest, 2.0))
    settled = report_of(PendingReceipt(future, waited_seconds=1.5)).settled()
    assert (settled.receipt, settled.receipt_seconds) == (manifest, 2.0)
    assert settled.waited_seconds is not None
    assert 1.5 <= settled.waited_seconds < 2.0


def test_a_server_that_hangs_does_not_keep_the_trainer_from_ending(publisher, monkeypatch):
    monkeypatch.setattr(publisher_module, "_CLOSE_S", 0.3)
    publisher._background = Background()
    future = publisher._background.submit(lambda: publisher.control.waiting_client.post("/hangs"))
    publisher._pending = PendingReceipt(future)
    started = time.monotonic()
    publisher.close()
    assert time.monotonic() - started < 2
    assert isinstance(future.exception(), EngineError)
