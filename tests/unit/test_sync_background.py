"""Calls in threads beside the trainer's own."""

import threading
import weakref

import pytest

from e2e_fp8.sync.background import Background, in_background


def test_calls_come_one_after_another_and_errors_are_theirs():
    background, order = Background(), []
    gate = threading.Event()

    def first() -> int:
        assert gate.wait(10)
        order.append(1)
        return 1

    def second() -> None:
        order.append(2)
        raise ValueError("mine")

    futures = [background.submit(first), background.submit(second), background.submit(lambda: order.append(3))]
    assert order == []
    gate.set()
    assert futures[0].result(10) == 1
    with pytest.raises(ValueError, match="mine"):
        futures[1].result(10)
    futures[2].result(10)
    assert order == [1, 2, 3]
    background.close()


def test_what_a_call_holds_is_let_go_and_the_thread_ends():
    class Large:
        pass

    large, before = Large(), set(threading.enumerate())
    background = Background()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    told = background.submit(lambda held=large: id(held))
    assert told.result(10) == id(large)
    background.close()
    thread.join(10)
    assert not thread.is_alive()
    gone = weakref.ref(large)
    del large
    assert gone() is None


def test_one_call_in_a_thread_of_its_own():
    assert in_background(threading.get_ident).result(10) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(10)
