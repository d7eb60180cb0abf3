"""A thread that looks whether what a rank waits for on a GPU can still come, and ends the wait when it cannot.

The waiting thread cannot look itself. A message of a dead peer never ends on the GPU, and a call into CUDA may wait for it without a
time limit: the first use of a kernel loads it, which waits for what runs (seen with ``torch._foreach_copy_`` on an H200), and a launch
waits while the queue is full. Aborting the group from another thread ends the message, and with it the call.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from weakref import WeakMethod

from e2e_fp8.errors import EngineError, UserError
from e2e_fp8.sync.background import in_background

CHECK_S = 0.2
"""Between two looks."""
_LEFT = "An earlier weight transfer of this group was left half way; publish again."
_REASON_S = 1.0
"""How long the reason of a broken message is asked for: a peer that was stopped does not answer."""


class PeerWatch:
    """The watch of one process group. Its thread begins with the first wait, and ends with the group, :meth:`end` or a loss."""

    def __init__(self, abort: Callable[[], None], *, timeout_s: float) -> None:
        """``abort``: a method of the group, which is not kept alive by this. It ends every outstanding message, called from any thread."""
        self._abort, self._timeout_s = WeakMethod(abort), timeout_s
        self._check: Callable[[], None] | None = None
        self._since = 0.0
        self._lost: BaseException | None = None
        """Of the wait under way."""
        self._lost_before = ""
        """Sentence of an earlier one: what ends here stays so, but its frames do not stay alive."""
        self._lock = threading.Lock()
        """Held while a wait is given up, which it does not leave before."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(self, check: Callable[[], None]) -> Iterator[None]:
        """While this lasts, ``check`` is called now and then by the thread; what it raises aborts the group and is raised here.

        So does what is raised in the block, or closes its generator, because messages are then under way: but for a refusal of this
        rank's own, a UserError that is no EngineError. Raises EngineError also when :meth:`progress` was not called for ``timeout_s``, and
        at once when an earlier wait was lost.
        """
        if self._lost_before:
            raise EngineError(self._lost_before)
        self.progress()
        self._check = check
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="e2e_fp8-peer-watch", daemon=True)
            self._thread.start()
        try:
            yield
        except BaseException as error:
            lost = self._leave()
            if isinstance(error, UserError) and not isinstance(error, EngineError):
                raise
            if lost is None:
                # what the library says of a broken message; why it broke says more
                lost = _raised_by(check) if isinstance(error.__cause__ or error, RuntimeError) else None
                self._break(lost or error)
            if lost is None or lost is error:
                raise
            raise lost from error
        if (lost := self._leave()) is not None:
            raise lost

    def _leave(self) -> BaseException | None:
        """End the wait, once; why it was lost."""
        with self._lock:
            lost, self._lost, self._check = self._lost, None, None
            if lost is not None:
                self._remember(lost)
            return lost

    def _break(self, error: BaseException) -> None:
        """End what is under way in a wait that was left with ``error``: one message that failed ends no other."""
        with self._lock:
            self._remember(error)
            if (abort := self._abort()) is not None:
                abort()

    def _remember(self, error: BaseException) -> None:
        told = str(error) or repr(error)
        self._lost_before = self._lost_before or (told if isinstance(error, Exception) else _LEFT)

    def progress(self) -> None:
        """Something came: the time limit begins again."""
        self._since = time.monotonic()

    def look(self) -> None:
        """For who waits and can look himself: raise what the thread has found, or that nothing came for too long."""
        if self._lost is None and self._is_late():
            # the thread may hang in its check, as long as a peer does that was stopped
            self._lose(self._check, self._late())
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._ended.is_set()

    def _is_late(self) -> bool:
        return time.monotonic() - self._since > self._timeout_s

    def _late(self) -> EngineError:
        return EngineError(f"A weight transfer did not go on for {self._timeout_s:g} s; the other side died or hangs.")

    def _look(self) -> None:
        check, asked = None, None
        while not self._ended.wait(CHECK_S) and self._abort() is not None:
            if self._check is not check or asked is None or asked.done():
                check = self._check
                asked = None if check is None else in_background(check)
            if asked is not None and (found := self._found(asked)) is not None and self._lose(check, found):
                return

    def _found(self, asked: Future[None]) -> BaseException | None:
        """What a check has found, or that the time limit is over: a check hangs with a peer that was stopped."""
        wait([asked], CHECK_S)
        return (asked.exception() if asked.done() else None) or (self._late() if self._is_late() else None)

    def _lose(self, check: Callable[[], None] | None, error: BaseException) -> bool:
        """Give the wait of ``check`` up, if it still goes on."""
        with self._lock:
            if check is None or self._check is not check:
                return False
            self._lost = self._lost or error
            if (abort := self._abort()) is not None:
                abort()
            return True


def _raised_by(check: Callable[[], None]) -> EngineError | None:
    """What ``check`` finds within :data:`_REASON_S`."""
    found = in_background(check)
    if not wait([found], _REASON_S).done:
        return None
    error = found.exception()
    return error if isinstance(error, EngineError) else None
