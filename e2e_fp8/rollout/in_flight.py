"""Generation requests between their admission and their answer: each belongs to one policy version, from the first token to the last.

An engine that pauses knows the requests it has. One that was admitted, and is still being read or tokenized, would join a paused engine
and run after the update, under weights that it was not admitted for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from e2e_fp8.rollout.comparison import Comparison

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION_HEADER = b"x-policy-version"
PAUSED = "generation is paused for a weight update"
_ENTER_S = 1.0
"""What a request gets to reach an engine that has nothing else to do."""
_ABORTED_S = 0.1
"""What an aborted request gets to answer with the tokens that it has."""
_POLL_S = 1e-3
_LEAVE_S = 0.05
"""What a cut request gets to leave the engine."""


class _Request:
    """What one request has answered so far."""

    def __init__(self, version: int | None, comparison: Comparison | None, receive: Receive, send: Send) -> None:
        self._version, self._comparison, self._receive, self._send = version, comparison, receive, send
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_started = self.has_content = self.is_complete = False
        self.why_cut = ""
        self.task: asyncio.Task[None] | None = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass an answer on, stamped with the policy version of the request's admission, once the bytes behind it are known to be right."""
        if self._comparison is not None:
            await self._comparison.passed()
        if self.why_cut:
            # until it is cancelled
            await asyncio.get_running_loop().create_future()
        if message["type"] == "http.response.start":
            self.is_started = True
            if self._version is not None:
                stamp = (VERSION_HEADER, str(self._version).encode())
                message = {**message, "headers": [*message.get("headers", []), stamp]}
        elif message["type"] == "http.response.body":
            # noted before the client has taken it, which may last
            self.has_content = self.has_content or bool(message.get("body"))
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def receive(self) -> MutableMapping[str, Any]:
        """What the client sends; of a request that is cut, that it has gone. At that alone vLLM's handlers, which run in tasks that nobody
        else cancels, abort what the engine has."""
        incoming = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({incoming, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self._gone.done() else incoming.result()
        finally:
            incoming.cancel()

    def cut(self, reason: str) -> None:
        """End the request; the engine aborts it if it has it."""
        self.why_cut = reason
        if not self._gone.done():
            self._gone.set_result(None)
        if self.task is not None:
            asyncio.get_running_loop().call_later(_LEAVE_S, self.task.cancel)


class InFlight:
    """The requests that were admitted and are not answered yet."""

    def __init__(self) -> None:
        self._open: set[_Request] = set()

    async def run(
        self, app: App, scope: Scope, receive: Receive, send: Send, version: int | None, comparison: Comparison | None = None
    ) -> str:
        """Have ``app`` answer a request that was admitted under ``version``, not before ``comparison`` of that version has passed.

        Why it was cut before an answer began; empty when it was not.
        """
        request = _Request(version, comparison, receive, send)
        request.task = asyncio.ensure_future(app(scope, request.receive, request.send))
        self._open.add(request)
        if comparison is not None:
            comparison.add(request.cut)
        try:
            await request.task
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not request.why_cut or (task is not None and task.cancelling()):
                raise
        except Exception:
            # an application may fail because its client has gone
            if not request.why_cut:
                raise
        finally:
            self._open.discard(request)
            if comparison is not None:
                comparison.discard(request.cut)
        # An answer that had begun breaks off here, which its client sees.
        return "" if request.is_started else request.why_cut

    def has_some(self) -> bool:
        """Whether a request is admitted and not answered."""
        return bool(self._open)

    async def settle(self, is_busy: Callable[[], bool], *, is_paused: bool, aborts: bool = False) -> None:
        """Return when no open request can get another token, new ones being refused.

        Requests that an engine at rest, or a paused one, still has not answered after ``_ENTER_S`` seconds (``_ABORTED_S``, where
        requests are aborted anyway) are cut. An answer that its client is slow to take does not count as open.

        Args:
            is_busy: whether the engine has requests.
            is_paused: it starts no more of them.
            aborts: what it had has been aborted.
        """
        patience_s = _ABORTED_S if aborts else _ENTER_S
        rest_since = None
        while waiting := self._waiting(is_busy()):
            now = time.monotonic()
            rest_since = (rest_since or now) if is_paused or not is_busy() else None
            if rest_since is not None and now - rest_since > patience_s:
                for request in waiting:
                    request.cut(PAUSED)
                await asyncio.wait([request.task for request in waiting if request.task is not None])
                return
            await asyncio.sleep(_POLL_S)

    def _waiting(self, is_busy: bool) -> list[_Request]:
        # Content comes from the engine, so at rest all of a begun answer has been generated.
        return [request for request in self._open if not request.is_complete and (is_busy or not request.has_content)]
