"""Generation that goes on before its weights are compared: no answer leaves before the trainer has said that the bytes are equal."""

import asyncio
from collections.abc import Callable


class Comparison:
    """One policy version whose trainer compares bytes while the engine already generates from them."""

    def __init__(self, policy_version: int, patience_s: float, late: Callable[[], None]) -> None:
        """``late`` is called when nothing was said for ``patience_s``. Needs a running event loop."""
        self.policy_version = policy_version
        loop = asyncio.get_running_loop()
        self._passed: asyncio.Future[None] = loop.create_future()
        self._cuts: set[Callable[[str], None]] = set()
        self._timer = loop.call_later(patience_s, late)

    def add(self, cut: Callable[[str], None]) -> None:
        """A request depends on it; ``cut`` is called with the reason when its answer must not go."""
        self._cuts.add(cut)

    def discard(self, cut: Callable[[str], None]) -> None:
        """The request is over."""
        self._cuts.discard(cut)

    async def passed(self) -> None:
        """Waits until the bytes are known to be equal; for ever when they are not, since the request is cut then."""
        await asyncio.shield(self._passed)

    def end(self, refusal: str = "") -> None:
        """Say once that they are, or why nothing that they made may be answered."""
        self._timer.cancel()
        if not refusal:
            self._passed.set_result(None)
            return
        for cut in self._cuts:
            cut(refusal)
