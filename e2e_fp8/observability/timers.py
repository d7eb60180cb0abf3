"""Seconds per phase of one step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from e2e_fp8.observability.names import PHASES


class PhaseTimer:
    """Wall-clock seconds per phase; a new timer for each step.

    A phase inside another phase pauses the outer one, so the phases of a step never add up to more than the step.
    A phase entered twice adds up. Work queued on a device is charged to the phase that waits for it; pass ``synchronize``
    (for example ``torch.cuda.synchronize``) to make each phase wait for its own.

    Example::

        timer = PhaseTimer()
        with timer("rollout"):
            samples = engine.generate(...)
        timer.seconds()["rollout"]
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the time inside the ``with`` block to ``phase``; also when the block raises.

        Raises:
            ValueError: ``phase`` is not one of PHASES.
        """
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; phases are {', '.join(PHASES)}")
        self._charge()
        self._open.append(phase)
        self._seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase entered so far, in the order of PHASES; a phase still open counts up to its last inner phase."""
        return {phase: self._seconds[phase] for phase in PHASES if phase in self._seconds}

    def metrics(self) -> dict[str, float]:
        """The same as ``time/<phase>`` metrics."""
        return {f"time/{phase}": value for phase, value in self.seconds().items()}

    def _charge(self) -> None:
        if self._open and self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
