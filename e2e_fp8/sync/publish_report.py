"""What one finished update was, and where its seconds went."""

import time
from dataclasses import dataclass

from e2e_fp8.sync.receipt import Manifest


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
    receipt: Manifest | None
    """Digests that trainer and every engine rank agree on; None when the receipt was not asked for."""
    phases: dict[str, float]
    """Where the seconds went, in order; a phase ``a: b`` is part of ``a`` where that is a phase too."""
    armed: bool = False
    """Whether :meth:`WeightPublisher.arm` had announced it."""


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
