"""A call in a thread that does not keep the process from ending."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background[T](call: Callable[[], T]) -> Future[T]:
    """The result to come of ``call``, or its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
