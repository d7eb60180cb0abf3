"""A thread that looks whether what a rank waits for on a GPU can still come, and ends the wait when it cannot.

The waiting thread cannot look itself. A message of a dead peer never ends on the GPU, and a call into CUDA may wait for it without a
time limit: the first use of a kernel loads it, which waits for what runs (seen with ``torch._foreach_copy_`` on an H200), and a launch
waits while the queue is full. Aborting the group from another thread ends the message, and with it the call.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from e2e_fp8.errors import EngineError

CHECK_S = 0.2
"""Between two looks."""


class PeerWatch:
    """The watch of one process group. Its thread begins with the first wait, and lives until :meth:`end` or a loss."""

    def __init__(self, abort: Callable[[], None], *, timeout_s: float) -> None:
        """``abort`` ends every outstanding message of the group; it may be called from any thread, and more than once."""
        self._abort, self._timeout_s = abort, timeout_s
        self._check: Callable[[], None] | None = None
        self._since = 0.0
        self._lost: Exception | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(self, check: Callable[[], None]) -> Iterator[None]:
        """While this lasts, ``check`` is called now and then by the thread; what it raises aborts the group and is raised here.

        Raises EngineError also when :meth:`progress` was not called for ``timeout_s``, and at once when an earlier wait was lost.
        """
        self.raise_lost()
        self.progress()
        self._check = check
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="e2e_fp8-peer-watch", daemon=True)
            self._thread.start()
        try:
            yield
        except (RuntimeError, EngineError) as error:
            # what the library says of an aborted message; why it was aborted says more
            if self._lost is None or error is self._lost:
                raise
            raise self._lost from error
        finally:
            self._check = None
            if self._lost is not None:
                # the group is being left by that thread
                self._thread.join()
        self.raise_lost()

    def progress(self) -> None:
        """Something came: the time limit begins again."""
        self._since = time.monotonic()

    def raise_lost(self) -> None:
        """Raise what a check raised, if one has."""
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(CHECK_S):
            check = self._check
            if check is None:
                continue
            try:
                check()
                if time.monotonic() - self._since > self._timeout_s:
                    raise EngineError(f"A weight transfer did not go on for {self._timeout_s:g} s; the other side died or hangs.")
            except Exception as error:
                if self._check is check:
                    self._lost = error
                    self._abort()
                    return
