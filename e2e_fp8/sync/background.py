"""Calls in threads that do not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


def in_background[T](call: Callable[[], T]) -> Future[T]:
    """The result to come of ``call``, or its error, in a thread of its own."""
    future: Future[T] = Future()
    threading.Thread(target=_fill, args=(future, call), daemon=True).start()
    return future


class Background:
    """One thread for calls one after another, there before it is needed: while a thread starts, its caller waits half a millisecond."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future, Callable] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit[T](self, call: Callable[[], T]) -> Future[T]:
        """The result to come of ``call``, or its error."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """End the thread, after what it has been given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            _fill(*given)
            # what a call holds is not held until the next one
            del given


def raise_failure(future: Future) -> None:
    """What ``future`` has ended with, if that is an error; nothing while it has not ended."""
    if future.done():
        future.result()


def _fill[T](future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
