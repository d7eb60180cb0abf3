"""The thread that ends a wait which nothing else can end."""

import threading
import time

import pytest

from e2e_fp8.errors import EngineError
from e2e_fp8.sync import peer_watch
from e2e_fp8.sync.peer_watch import PeerWatch


class Blocking:
    """A group whose messages end when it is aborted, and not before: as a call into CUDA is."""

    def __init__(self) -> None:
        self.ended, self.aborts = threading.Event(), 0

    def abort(self) -> None:
        self.aborts += 1
        self.ended.set()

    def wait(self) -> None:
        assert self.ended.wait(30), "nobody aborted"


def fail() -> None:
    raise EngineError("the trainer died")


@pytest.fixture
def group():
    return Blocking()


@pytest.fixture
def watch(group):
    watch = PeerWatch(group.abort, timeout_s=60)
    yield watch
    watch.end()


def test_a_call_that_never_ends_is_ended(group, watch):
    began = time.monotonic()
    with pytest.raises(EngineError, match="the trainer died"), watch.during(fail):
        group.wait()
    assert (group.aborts, time.monotonic() - began < 10) == (1, True)


def test_the_reason_is_told_and_not_what_the_library_says_of_it(group, watch):
    def aborted() -> None:
        group.wait()
        raise RuntimeError("NCCL communicator was aborted on rank 1.")

    with pytest.raises(EngineError, match="the trainer died") as caught, watch.during(fail):
        aborted()
    assert "aborted on rank 1" in str(caught.value.__cause__)


def test_what_is_lost_stays_lost(group, watch):
    with pytest.raises(EngineError), watch.during(fail):
        group.wait()
    with pytest.raises(EngineError, match="the trainer died"), watch.during(lambda: None):
        raise AssertionError("not reached")


def test_a_failure_of_its_own_is_no_loss(group, watch):
    with pytest.raises(RuntimeError, match="a bug"), watch.during(lambda: None):
        raise RuntimeError("a bug")
    with watch.during(lambda: None):
        time.sleep(2 * peer_watch.CHECK_S)
    assert not group.aborts


def test_nobody_is_asked_between_two_waits(group, watch):
    seen = []
    with watch.during(lambda: seen.append(1)):
        time.sleep(3 * peer_watch.CHECK_S)
    asked = len(seen)
    time.sleep(3 * peer_watch.CHECK_S)
    assert asked
    assert (len(seen), group.aborts) == (asked, 0)


def test_a_check_that_fails_after_its_wait_ends_no_later_one(group, watch):
    asked, over = threading.Event(), threading.Event()

    def late() -> None:
        asked.set()
        over.wait(30)
        fail()

    with watch.during(late):
        assert asked.wait(30)
    over.set()
    with watch.during(lambda: None):
        time.sleep(2 * peer_watch.CHECK_S)
    assert not group.aborts


def test_a_wait_without_progress_ends_and_one_with_progress_goes_on(group):
    watch = PeerWatch(group.abort, timeout_s=1.0)
    with watch.during(lambda: None):
        for _ in range(8):
            time.sleep(0.25)
            watch.progress()
    assert not group.aborts
    with pytest.raises(EngineError, match=r"did not go on for 1 s; the other side died or hangs"), watch.during(lambda: None):
        group.wait()
