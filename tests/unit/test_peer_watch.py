"""The thread that ends a wait which nothing else can end."""

import gc
import threading
import time
import weakref

import pytest

from e2e_fp8.errors import EngineError, LayoutError, UserError
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


@pytest.mark.parametrize(("error", "told"), [(ValueError("no number"), "the trainer died"), (LayoutError("its shape"), "its shape")])
def test_the_reason_is_told_unless_this_rank_refuses_itself(group, watch, error, told):
    def ends() -> None:
        group.wait()
        raise error

    with pytest.raises(UserError, match=told), watch.during(fail):
        ends()


@pytest.mark.parametrize("wraps", [False, True])
def test_a_message_that_breaks_before_the_thread_looks_has_its_reason(watch, wraps):
    def breaks() -> None:
        broken = RuntimeError("connection reset by peer")
        if wraps:
            raise EngineError("Rank 1 died or hangs.") from broken
        raise broken

    with pytest.raises(EngineError, match="the trainer died"), watch.during(fail):
        breaks()


def test_a_broken_message_does_not_wait_for_a_peer_that_does_not_answer(watch):
    hangs, began = threading.Event(), time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"), watch.during(lambda: hangs.wait(30)):
        raise RuntimeError("out of memory")
    assert time.monotonic() - began < 10
    hangs.set()


def test_a_loss_without_words_is_one_too(group, watch):
    def fail_silently() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError), watch.during(fail_silently):
        group.wait()
    with pytest.raises(EngineError, match="TimeoutError"), watch.during(lambda: None):
        raise AssertionError("not reached")


class SlowToEnd(Blocking):
    """Its messages end at once when it is aborted, and the abort itself later."""

    over = False

    def abort(self) -> None:
        super().abort()
        time.sleep(0.5)
        self.over = True


def test_who_waited_goes_on_only_when_the_group_has_been_left():
    group = SlowToEnd()
    watch = PeerWatch(group.abort, timeout_s=60)
    with pytest.raises(EngineError, match="the trainer died"), watch.during(fail):
        group.wait()
    assert group.over


def test_nothing_of_a_lost_wait_is_kept(group, watch):
    kept: list[weakref.ref] = []

    def receive() -> None:
        buffer = Blocking()
        kept.append(weakref.ref(buffer))
        with watch.during(fail):
            group.wait()

    with pytest.raises(EngineError):
        receive()
    gc.collect()
    assert kept[0]() is None


def test_who_waits_himself_sees_the_loss_and_the_time_limit(group):
    """Also while the thread hangs in its check, as it does when the trainer's whole process is stopped."""
    watch, hangs = PeerWatch(group.abort, timeout_s=1.0), threading.Event()

    def poll() -> None:
        while not group.ended.is_set():
            watch.look()
            time.sleep(0.01)

    with pytest.raises(EngineError, match="did not go on for 1 s"), watch.during(lambda: hangs.wait(30)):
        poll()
    assert group.aborts == 1
    hangs.set()


def test_a_group_that_is_dropped_ends_the_thread_and_is_not_kept():
    group = Blocking()
    watch = PeerWatch(group.abort, timeout_s=60)
    with watch.during(lambda: None):
        pass
    kept = weakref.ref(group)
    del group
    assert kept() is None
    assert watch._thread is not None
    watch._thread.join(10)
    assert not watch._thread.is_alive()


def test_a_refusal_of_its_own_is_no_loss(group, watch):
    with pytest.raises(LayoutError, match="its shape"), watch.during(lambda: None):
        raise LayoutError("its shape")
    with watch.during(lambda: None):
        time.sleep(2 * peer_watch.CHECK_S)
    assert not group.aborts


@pytest.mark.parametrize("error", [RuntimeError("connection reset by peer"), EngineError("Rank 1 died or hangs."), KeyboardInterrupt()])
def test_what_else_ends_a_wait_ends_every_message_that_is_under_way(group, watch, error):
    """One that NCCL gave up is not the only one; its peer may live."""
    with pytest.raises(type(error)), watch.during(lambda: None):
        raise error
    assert group.aborts == 1
    told = str(error) or "An earlier weight transfer of this group was left half way"
    with pytest.raises(EngineError, match=told), watch.during(lambda: None):
        raise AssertionError("not reached")


def test_messages_of_a_generator_that_nobody_reads_on_are_ended(group, watch):
    def receive():
        with watch.during(lambda: None):
            yield from range(3)

    def consume() -> None:
        for _ in receive():
            raise LayoutError("its shape")

    with pytest.raises(LayoutError):
        consume()
    gc.collect()
    assert group.aborts == 1


def test_a_check_that_hangs_hides_no_time_limit(group):
    """A peer that was stopped answers nothing, and who waits for it may be inside CUDA, where it cannot look itself."""
    watch, hangs = PeerWatch(group.abort, timeout_s=1.0), threading.Event()
    with pytest.raises(EngineError, match="did not go on for 1 s"), watch.during(lambda: hangs.wait(30)):
        group.wait()
    assert group.aborts == 1
    hangs.set()


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
    watch = PeerWatch(group.abort, timeout_s=3.0)
    with watch.during(lambda: None):
        for _ in range(8):
            time.sleep(0.5)
            watch.progress()
    assert not group.aborts
    with pytest.raises(EngineError, match=r"did not go on for 3 s; the other side died or hangs"), watch.during(lambda: None):
        group.wait()
