"""What one finished update was, and where its seconds went."""

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from e2e_fp8.errors import ConfigError
from e2e_fp8.sync.receipt import Manifest


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What becomes of generation and of the receipt in one update."""

    receipt: bool
    in_flight: str
    """Of requests: ``wait`` or ``abort``."""
    before: str
    """What the receipt is for: ``generation`` resumes after it, or ``answers`` alone wait."""
    sealed: bool = False
    """Whether one hash of each rank is enough for the receipt."""

    def __post_init__(self) -> None:
        """Raises ConfigError for words that do not exist."""
        if self.in_flight not in ("wait", "abort"):
            raise ConfigError(f"in_flight is {self.in_flight!r}: use wait or abort.")
        if self.before not in ("generation", "answers"):
            raise ConfigError(f"before is {self.before!r}: bytes are compared before generation or before answers.")

    def where(self, *, parts_known: bool) -> "Wish":
        """The same, given whether the ranks have told which parts they hold."""
        return replace(self, sealed=self.receipt and parts_known)

    @property
    def meanwhile(self) -> bool:
        """Whether bytes are compared while the engine already generates."""
        return self.sealed and self.before == "answers"

    @property
    def resume(self) -> bool:
        """Whether generation goes on in the update's own call."""
        return self.meanwhile or not self.receipt


class PendingReceipt:
    """A comparison under way in another thread."""

    def __init__(self, future: "Future[tuple[Manifest, float]]", *, waited_seconds: float = 0.0) -> None:
        """``future``: the receipt, and the seconds until it was there; ``waited_seconds``: of these, when ``publish`` had not returned."""
        self._future, self.waited_seconds = future, waited_seconds
        self.was_told = False
        """Whether somebody has been told that it failed."""

    def result(self) -> tuple[Manifest, float]:
        """What the future gives; waits for it. Its errors."""
        # an interrupt of the wait is none of them
        error = self._future.exception()
        if error is not None:
            self.was_told = True
            raise error
        return self._future.result()

    def ends_within(self, seconds: float) -> bool:
        """Whether it is over, now or after so many seconds at most."""
        return bool(wait([self._future], seconds).done)


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """One finished update."""

    policy_version: int
    num_bytes: int
    """Bytes of all tensors sent."""
    seconds: float
    """From planning until the trainer knew that every rank had everything, pause included unless it came before (:attr:`armed`), receipt
    not."""
    receipt_seconds: float
    """What the receipt took beyond that; digests that were computed while bytes were under way are in :attr:`seconds`."""
    answer_seconds: float = 0.0
    """The rest of the call, in neither of the two: until the trainer knew that generation goes on."""
    receipt: Manifest | None
    """Digests that trainer and every engine rank agree on; None when the receipt was not asked for, and while it is :attr:`pending`."""
    phases: dict[str, float]
    """Where the seconds went, in order; a phase ``a: b`` is part of ``a`` where that is a phase too."""
    armed: bool = False
    """Whether :meth:`WeightPublisher.arm` had announced it."""
    pending: PendingReceipt | None = None
    """The comparison that goes on while the server generates, of which no answer leaves before it is over."""
    waited_seconds: float | None = None
    """Of :attr:`receipt_seconds`, those for which somebody waited; None: all."""

    def settled(self) -> "PublishReport":
        """With the receipt; waits for a comparison under way.

        Raises ByteMismatchError when the engine's bytes are not the trainer's, EngineError when the server died; it generates nothing then.
        """
        if self.pending is None:
            return self
        started = time.perf_counter()
        receipt, seconds = self.pending.result()
        waited = min(seconds, self.pending.waited_seconds + time.perf_counter() - started)
        return replace(self, receipt=receipt, receipt_seconds=seconds, waited_seconds=waited, pending=None)


class PhaseClock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Everything since the last mark was ``phase``."""
        now = time.perf_counter()
        self.add(phase, now - self._last)
        self._last = now

    def add(self, phase: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def move(self, seconds: float, of: str, to: str) -> None:
        """Of one phase so many seconds were another."""
        self.add(of, -seconds)
        self.add(to, seconds)

    def total(self) -> float:
        """Seconds from the start to the last mark."""
        return self._last - self._started
