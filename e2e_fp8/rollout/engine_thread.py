"""One thread that makes every call into vLLM, so that a wedged call can be timed out and named.

A call stuck in native code cannot be interrupted from Python. The caller therefore waits for it elsewhere: when the
time is up the caller gets an EngineError, the stuck thread is left behind (it is a daemon), and the engine is dead.
All calls share one thread, because OpenMP pools and inference mode belong to a thread.
"""

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from e2e_fp8.errors import EngineError, UserError

Result = TypeVar("Result")


class EngineThread:
    """Runs calls one after another; the first call that fails or times out makes all later ones fail."""

    def __init__(self, name: str = "rollout-engine") -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._dead: str | None = None
        self.progress = ""
        """Free text set by the running call; quoted when it times out."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        # The interpreter ends daemon threads inside whatever they call, and native code answers with an abort.
        atexit.register(self._finish, 10.0)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                # The global generators are the trainer's too: a resumed run must find them as an undisturbed one leaves them.
                with torch.random.fork_rng():
                    result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def run(self, phase: str, timeout_s: float, call: Callable[[], Result]) -> Result:
        """Result of ``call`` made on the engine's thread.

        Raises EngineError naming ``phase`` and the seconds when it takes longer than ``timeout_s``, when it fails with
        anything but a UserError, or when an earlier call did.
        """
        if self._dead is not None:
            raise EngineError(f"The rollout engine is dead ({self._dead}); cannot do {phase}. Restart the run with run.resume=true.")
        future: Future = Future()
        self.progress = ""
        self._calls.put((call, future))
        try:
            return future.result(timeout=timeout_s)
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and not future.done():
                self._dead = f"{phase} did not finish within {timeout_s:g} s"
                progress = f" ({self.progress})" if self.progress else ""
                raise EngineError(
                    f"The rollout engine is wedged: {self._dead}{progress}. Raise rollout.timeout_s or look at vLLM's log."
                ) from None
            self._dead = f"{phase} failed with {type(error).__name__}: {error}"
            raise EngineError(f"The rollout engine died: {self._dead}.") from error

    @property
    def is_dead(self) -> bool:
        """Whether an earlier call failed, timed out, or the thread was stopped."""
        return self._dead is not None

    def _finish(self, grace_s: float) -> None:
        """Let the thread end, waiting for the call it is in for at most ``grace_s`` seconds."""
        self._calls.put(None)
        self._thread.join(grace_s)

    def stop(self) -> None:
        """Let the thread end after the calls already given to it."""
        self._dead = self._dead or "it was closed"
        self._calls.put(None)
