"""ASGI middleware for ``vllm serve --middleware e2e_fp8.rollout.token_guard.TokenGuard``.

vLLM's control routes have no authentication, and its generation routes know nothing of half-written weights. The guard demands
a bearer token on every route but ``/health`` and refuses to generate while the weights are torn. One front-end process is
assumed, vLLM's default, because the guard keeps the state it refuses by.
"""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from e2e_fp8.sync.token import read_token

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_ROUTES = ("/health",)
CONTROL_ROUTES = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/tokenize",
    "/detokenize",
)
"""POST routes that work whatever state the weights are in; any other is taken for generation. ``/collective_rpc?pause=wait`` (or
``abort``) pauses generation before the call, which may then write weights: one round trip instead of two."""
VERSION_HEADER = b"x-policy-version"
_TORN = {"policy_version": None, "refusal": "a weight update is running or was left halfway"}


class TokenGuard:
    """Answers 401 without the token, 503 while the weights must not be used, 409 for an update that would mix versions."""

    def __init__(self, app: App) -> None:
        """Raises ConfigError when the environment holds no token (see ``e2e_fp8.sync.token``)."""
        self._app = app
        self._expected = f"Bearer {read_token()}".encode()
        self._state: dict[str, Any] | None = None
        """Policy version and reason to refuse, as the workers said last; None when they have to be asked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_ROUTES):
            await self._app(scope, receive, send)
            return
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._expected):
            await _refuse(scope, send, 401, "This route needs the header 'Authorization: Bearer TOKEN' with the server's token.")
            return
        refusal = await self._refusal(scope)
        if refusal is not None:
            await _refuse(scope, send, *refusal)
            return
        await self._app(scope, receive, self._stamped(send) if self._generates(scope) else send)

    @staticmethod
    def _generates(scope: Scope) -> bool:
        return scope["type"] != "http" or (scope["method"] not in ("GET", "HEAD", "OPTIONS") and scope["path"] not in CONTROL_ROUTES)

    async def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and sentence when the request must not go on."""
        engine = scope["app"].state.engine_client if "app" in scope else None
        if engine is None:
            return 503, "The server is still starting."
        if (getattr(scope["app"].state.args, "api_server_count", None) or 1) > 1:
            return 503, "The guard works with one front-end process: start the server without --api-server-count."
        path, query = scope["path"], parse_qs(scope.get("query_string", b"").decode())
        if self._generates(scope):
            state = await self._ask(engine)
            return (503, f"Generation refused: {state['refusal']}.") if state["refusal"] else None
        if path == "/pause":
            if query.get("mode") == ["keep"]:
                return 409, "mode=keep would finish requests under other weights than they began with: use mode=wait or mode=abort."
            await self._refuse_while_paused(engine)
        if path == "/collective_rpc" and "pause" in query:
            mode = query["pause"][0]
            if mode not in ("wait", "abort"):
                return 409, f"pause={mode} is neither wait nor abort."
            await self._refuse_while_paused(engine)
            await _pause(engine, mode)
            self._state = _TORN
        if path == "/sleep" and query.get("level") == ["2"]:
            await engine.collective_rpc("refuse_generation", args=("sleep level 2 dropped the weights: publish a policy version",))
            self._state = None
        if path == "/start_weight_update":
            if not await engine.is_paused():
                return 409, "Generation still runs: POST /pause?mode=wait before the update, so that no response mixes two policy versions."
            self._state = _TORN
        if path == "/resume":
            self._state = None
            state = await self._ask(engine)
            return (409, f"Cannot resume: {state['refusal']}.") if state["refusal"] else None
        return None

    async def _refuse_while_paused(self, engine: Any) -> None:
        # Requests would only queue, for ever if the trainer dies; those in flight still carry their version.
        state = await self._ask(engine)
        self._state = {**state, "refusal": state["refusal"] or "generation is paused for a weight update"}

    async def _ask(self, engine: Any) -> dict[str, Any]:
        """State of the weights; the first rank that refuses speaks for all."""
        state = self._state
        if state is None:
            states = await engine.collective_rpc("weight_state")
            answer = next((state for state in states if state["refusal"]), states[0])
            if not answer["refusal"] and any(state["policy_version"] != answer["policy_version"] for state in states):
                answer = {"policy_version": None, "refusal": "the ranks hold different policy versions: publish again"}
            # An update may have begun while the workers answered; its mark must stay.
            state = self._state = self._state or answer
        return state

    def _stamped(self, send: Send) -> Send:
        """Adds the policy version that produced the response as a header."""

        async def stamped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._state is not None and self._state["policy_version"] is not None:
                version = str(self._state["policy_version"]).encode()
                message = {**message, "headers": [*message.get("headers", []), (VERSION_HEADER, version)]}
            await send(message)

        return stamped


async def _pause(engine: Any, mode: str) -> None:
    """Pause the scheduler and drop its caches.

    ``engine.pause_generation`` also sleeps for 20 ms, so that answers of requests that just ended get out before it returns;
    with no request in flight there are none, and its two other steps are enough.
    """
    if engine.output_processor.has_unfinished_requests():
        await engine.pause_generation(mode=mode, clear_cache=True)
        return
    await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)


async def _refuse(scope: Scope, send: Send, status: int, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": sentence})
        return
    body = json.dumps({"error": {"message": sentence, "type": "e2e_fp8", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
