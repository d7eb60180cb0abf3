"""ASGI middleware for ``vllm serve --middleware e2e_fp8.rollout.token_guard.TokenGuard``.

vLLM's control routes have no authentication, and its generation routes know nothing of half-written weights. The guard demands
a bearer token on every route but ``/health`` and refuses to generate while the weights are torn. One front-end process is
assumed, vLLM's default, because the guard keeps the state it refuses by. It has two routes of its own: ``POST /weight_update``, which is
all that a settled sync needs besides ``/resume``, and ``POST /refuse_generation``.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from e2e_fp8.rollout.asgi import again, answer_request, body_of, fields_of, query_of, refuse_request, version_to_compare, with_status
from e2e_fp8.rollout.comparison import Comparison
from e2e_fp8.rollout.guarded_routes import CONTROL_ROUTES, FINISH_ROUTE, OPEN_ROUTES, WITHOUT_WORKERS, may_be_called
from e2e_fp8.rollout.in_flight import PAUSED, App, InFlight, Receive, Scope, Send
from e2e_fp8.rollout.paused_call import METHOD, is_whole
from e2e_fp8.sync.http_client import METHOD_ROUTE, REFUSE_ROUTE, UPDATE_ROUTE
from e2e_fp8.sync.token import read_token

_ARMED = "A trainer has announced a weight update, for which the workers wait: it has to publish, cancel or end first."
_EARLY_ROUTE = "/v1/responses"
_ALIVE_S = 1.0
"""Between two looks at whether the engine lives while a call waits for it."""
_TORN = {"policy_version": None, "refusal": "a weight update is running or was left halfway"}


class TokenGuard:
    """Answers 401 without the token, 503 while the weights must not be used, 409 for an update that would mix versions."""

    def __init__(self, app: App) -> None:
        """Raises ConfigError when the environment holds no token (see ``e2e_fp8.sync.token``)."""
        self._app = app
        self._expected = f"Bearer {read_token()}".encode()
        self._state: dict[str, Any] | None = None
        """Policy version and reason to refuse, as the workers said last; None when they have to be asked."""
        self._told: dict[str, Any] | None = None
        """What the workers said at the end of an update, for ``/resume``; None once another control call may have changed it."""
        self._calls = 0
        """Control calls so far that may have changed it."""
        self._updating = 0
        """Steps of updates under way."""
        self._armed = False
        """Whether the workers wait for a trainer's word, and with them vLLM's engine core."""
        self._turn = 0
        """Of the last step of an update that came."""
        self._uncompared: dict[int, str] = {}
        """Policy versions that may be written, and whose trainers have not said yet that the engine holds their bytes; with the channel of
        the trainer that wrote last, since two may give one number to different weights."""
        self._comparison: Comparison | None = None
        """Of that version, while the engine already generates from it."""
        self._in_flight = InFlight()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_ROUTES):
            await self._app(scope, receive, send)
            return
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._expected):
            await refuse_request(scope, send, 401, "This route needs the header 'Authorization: Bearer TOKEN' with the server's token.")
            return
        refusal = await self._refusal(scope)
        if refusal is not None:
            await refuse_request(scope, send, *refusal)
        elif self._generates(scope):
            # nothing was awaited since the state was looked at
            version = None if self._state is None else self._state["policy_version"]
            if reason := await self._in_flight.run(self._app, scope, receive, send, version, self._comparison):
                await refuse_request(scope, send, 503, f"Generation refused: {reason}.")
        elif (scope["method"], scope["path"]) == ("POST", UPDATE_ROUTE):
            await self._update(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("POST", REFUSE_ROUTE):
            await self._refuse_from_now(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("POST", "/resume"):
            await self._resume(scope, send)
        elif (scope["method"], scope["path"]) == ("POST", METHOD_ROUTE):
            await self._worker_call(scope, receive, send)
        elif (scope["method"], scope["path"]) == ("POST", FINISH_ROUTE):
            await self._finish(scope, receive, send)
        elif scope["path"] not in CONTROL_ROUTES:
            await self._app(scope, receive, send)
        else:
            with self._may_change():
                await self._app(scope, receive, send)

    @contextmanager
    def _may_change(self) -> Iterator[None]:
        """Around a call that may change what the workers would say of their weights."""
        self._calls += 1
        self._told = None
        try:
            yield
        finally:
            self._told = None

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As vLLM's route does; afterwards nothing is to be compared, unless another update has come meanwhile."""
        seen, turn = list[int](), self._turn
        with self._may_change():
            await self._app(scope, receive, with_status(send, seen))
        if seen == [200] and turn == self._turn and not self._updating:
            self._uncompared = {}

    async def _worker_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        if body is None:
            return
        method = fields_of(body).get("method")
        if not may_be_called(method, getattr(scope["app"].state.args, "worker_extension_cls", "")):
            what = "methods of the worker extension that change no weights"
            await refuse_request(scope, send, 409, f"{METHOD_ROUTE} takes {what}, and {method!r} is none of these (docs/server.md).")
            return
        with self._may_change():
            await self._app(scope, again(body, receive), send)

    async def _update(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``weight_update`` of every worker with the body, an ``UpdateStep``, behind a pause where the query has ``pause``; the answer
        is that of ``/collective_rpc``."""
        engine, mode = scope["app"].state.engine_client, query_of(scope).get("pause")
        body = await body_of(receive)
        if body is None:
            return
        step = body.decode(errors="replace")
        fields = fields_of(step)
        # the workers are going to wait for the trainer's word
        announced = bool(fields.get("flags"))
        if self._armed or (announced and self._updating):
            # it began while this body was read, or the workers are needed for its next step
            why = _ARMED if self._armed else "Another weight update is under way: it cannot be announced before."
            await refuse_request(scope, send, 409, why)
            return
        # its weights may be about to go
        self._end_comparison("another update came before its trainer had said that it compared bytes")
        version = version_to_compare(fields)
        self._turn += 1
        self._updating += 1
        self._armed = announced
        try:
            results = await _while_alive(engine, self._step(engine, mode, step, fields, version, turn=self._turn))
        except Exception as error:
            # the workers' own, or the end of the engine
            await refuse_request(scope, send, 500, str(error))
            return
        await answer_request(send, 200, {"results": results})

    async def _step(
        self, engine: Any, mode: str | None, step: str, fields: Mapping[str, Any], version: int | None, *, turn: int
    ) -> list[dict[str, Any]]:
        """What every worker answers to a step that has been counted; over for the guard when the answer is here.

        Whoever waits for this to return runs later, perhaps after a client that was told what the engine answered next. ``version``: what
        its trainer is going to compare: until the answer is here, the word of who wrote it before counts.
        """
        announced, resume = bool(fields.get("flags")), bool(fields.get("resume"))
        try:
            with self._may_change():
                calls = self._calls
                try:
                    if mode is None:
                        results = await engine.collective_rpc("weight_update", args=(step,))
                    else:
                        results = await self._paused_call(engine, mode, step, announced=announced, resume=resume)
                except BaseException:
                    # it may have written
                    self._mark(version, fields)
                    raise
                if not _came_to_nothing(results):
                    self._mark(version, fields)
                if resume and all(map(is_whole, results)):
                    if mode is None and turn == self._turn:
                        # with a pause the core has done that
                        await engine.resume_generation()
                    if turn == self._turn:
                        # of another step that came since, all this is to say
                        state = _merged([result["state"] for result in results]) if calls == self._calls else None
                        self._go_on(version, float(fields.get("patience_s", 0.0)), state)
        finally:
            self._updating -= 1
            if announced:
                self._armed = False
        if turn == self._turn:
            self._note_written(version, results)
        states = [result["state"] for result in results if "state" in result]
        if len(states) == len(results) and calls == self._calls:
            # No other call began meanwhile.
            self._told = _merged(states)
        return results

    def _mark(self, version: int | None, fields: Mapping[str, Any]) -> None:
        """From now on the word of this step's trainer counts for ``version``: it has begun to write it."""
        if version is not None and (fields.get("begin", True) or version not in self._uncompared):
            self._uncompared[version] = fields["channel"]

    def _note_written(self, version: int | None, results: Sequence[Mapping[str, Any]]) -> None:
        """What is left to compare after the last step that came: of whole weights themselves, otherwise also of those before."""
        if all(map(is_whole, results)):
            self._uncompared = {v: channel for v, channel in self._uncompared.items() if v == version}

    def _go_on(self, version: int | None, patience_s: float, state: dict[str, Any] | None) -> None:
        """Admit requests again, ``state`` being the new weights' if it is known; answers wait where ``version`` is still to be compared."""
        if version is not None:
            self._comparison = Comparison(version, patience_s, self._too_late)
        self._state = state

    def _too_late(self) -> None:
        self._end_comparison("its trainer did not say in time that it compared bytes")

    def _end_comparison(self, refusal: str = "") -> None:
        """Let the answers go that wait for it, or refuse them. Generation is refused then for as long as nobody has compared."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            comparison.end(refusal and f"policy version {comparison.policy_version} is not used: {refusal}")

    async def _refuse_from_now(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``refuse_generation`` of every worker with the ``reason`` of the body; answers that wait for a comparison are refused too."""
        body = await body_of(receive)
        if body is None:
            return
        reason = str(fields_of(body).get("reason", "a trainer asked for that"))
        self._end_comparison(reason)
        try:
            with self._may_change():
                await scope["app"].state.engine_client.collective_rpc("refuse_generation", args=(reason,))
        except Exception as error:
            await refuse_request(scope, send, 500, str(error))
            return
        if not self._updating:
            self._state = None
        await answer_request(send, 200, {})

    async def _resume(self, scope: Scope, send: Send) -> None:
        """As vLLM's route does, without the millisecond that its routing takes: nothing generates until then."""
        if self._comparison is not None:
            self._uncompared.pop(self._comparison.policy_version, None)
            self._end_comparison()
            await answer_request(send, 200, {"status": "compared"})
            return
        # nothing was awaited since the state was looked at
        version, turn = None if self._state is None else self._state["policy_version"], self._turn
        try:
            await scope["app"].state.engine_client.resume_generation()
        except Exception as error:
            await refuse_request(scope, send, 500, f"Failed to resume generation: {error}")
            return
        if turn == self._turn:
            # an update that has begun meanwhile may be of the same version
            self._uncompared = {v: channel for v, channel in self._uncompared.items() if v != version}
        await answer_request(send, 200, {"status": "resumed"})

    async def _paused_call(self, engine: Any, mode: str, step: str, *, announced: bool, resume: bool) -> list[dict[str, Any]]:
        """From the pause on the weights count as torn. Requests that were admitted before it end first, under their own version.

        An announced update that came to nothing ends as if it had not been: nobody may be there to resume.
        """
        # asking takes a millisecond
        was_paused = (announced or self._in_flight.has_some()) and await engine.is_paused()
        resumes = announced and not was_paused
        await self._refuse_while_paused(engine)
        is_busy = engine.output_processor.has_unfinished_requests
        if mode == "wait":
            await self._in_flight.settle(is_busy, is_paused=was_paused)
        if is_paused := is_busy():
            await engine.pause_generation(mode=mode, clear_cache=True)
        elif engine.renderer.mm_processor_cache is not None:
            await engine.renderer.clear_mm_cache_async()
        await self._in_flight.settle(is_busy, is_paused=is_paused or was_paused, aborts=mode == "abort")
        self._state = _TORN
        results = await engine.engine_core.call_utility_async(METHOD, mode, "weight_update", (step,), resume)
        if announced and _came_to_nothing(results):
            if resumes:
                await engine.resume_generation()
            self._state = None
            if not resumes:
                await self._refuse_while_paused(engine)
        return results

    @staticmethod
    def _generates(scope: Scope) -> bool:
        return scope["type"] != "http" or (scope["method"] not in ("GET", "HEAD", "OPTIONS") and scope["path"] not in CONTROL_ROUTES)

    async def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and sentence when the request must not go on."""
        engine = scope["app"].state.engine_client if "app" in scope else None
        if engine is None:
            return 503, "The server is still starting."
        arguments = scope["app"].state.args
        if (getattr(arguments, "api_server_count", None) or 1) > 1:
            return 503, "The guard works with one front-end process: start the server without --api-server-count."
        if (getattr(arguments, "data_parallel_size", None) or 1) > 1:
            return 503, "The guard sees the weights of one engine: start a server for each, without --data-parallel-size."
        if getattr(arguments, "root_path", None):
            return 503, "The guard knows routes by their whole paths: start the server without --root-path."
        path, query = scope["path"], query_of(scope)
        if scope["type"] == "websocket":
            return 503, "WebSockets are not served: a session would outlive its policy version."
        if self._generates(scope) and path.startswith(_EARLY_ROUTE):
            return (
                503,
                f"{_EARLY_ROUTE} is not served: its answers begin before the engine has the request, and so outlive a policy version.",
            )
        if self._generates(scope):
            state = await self._ask(engine)
            refusal, version = state["refusal"], state["policy_version"]
            held = self._comparison is not None and self._comparison.policy_version == version
            if not refusal and version in self._uncompared and not held:
                # the engine goes on, but nobody has compared in time
                refusal = self._not_compared(version)
            return (503, f"Generation refused: {refusal}.") if refusal else None
        if self._armed and path in CONTROL_ROUTES and path not in WITHOUT_WORKERS:
            return 409, _ARMED
        if path == "/pause":
            if query.get("mode") == "keep":
                return 409, "mode=keep would finish requests under other weights than they began with: use mode=wait or mode=abort."
            await self._refuse_while_paused(engine)
        if path == UPDATE_ROUTE and query.get("pause") not in (None, "wait", "abort"):
            return 409, f"pause={query['pause']} is neither wait nor abort."
        if path == UPDATE_ROUTE and "pause" not in query and self._state is not _TORN:
            return 409, "An update begins with pause=wait or pause=abort, so that no response mixes two policy versions."
        if path == "/sleep" and self._comparison is not None:
            return 409, f"The weights of policy version {self._comparison.policy_version} are still compared: sleep after that."
        if path == "/sleep" and query.get("level", "1") not in ("0", "1", "2"):
            return 409, f"level={query['level']} of sleep is none of 0, 1 and 2."
        if path == "/sleep" and query.get("level") == "2":
            await engine.collective_rpc("refuse_generation", args=("sleep level 2 dropped the weights: publish a policy version",))
            self._state = None
        if path == "/start_weight_update":
            turn = self._turn
            if not await engine.is_paused():
                return 409, "Generation still runs: POST /pause?mode=wait before the update, so that no response mixes two policy versions."
            await self._in_flight.settle(engine.output_processor.has_unfinished_requests, is_paused=True)
            if self._updating or turn != self._turn:
                return 409, "Another weight update is under way, or has been meanwhile."
            self._end_comparison("another update came before its trainer had said that it compared bytes")
            self._state = _TORN
        return await self._resume_refusal(engine, query) if (scope["method"], path) == ("POST", "/resume") else None

    async def _resume_refusal(self, engine: Any, query: dict[str, str]) -> tuple[int, str] | None:
        under_way = 409, "Cannot resume: a weight update is under way."
        if self._updating:
            return under_way
        if self._comparison is not None:
            version = self._comparison.policy_version
            return None if self._is_compared(version, query) else (409, f"Cannot resume: {self._not_compared(version)}.")
        self._state = self._told
        state = await self._ask(engine)
        if self._updating:
            # it began while the workers answered
            return under_way
        version = state["policy_version"]
        if not state["refusal"] and version in self._uncompared and not self._is_compared(version, query):
            state = self._state = {**state, "refusal": self._not_compared(version)}
        return (409, f"Cannot resume: {state['refusal']}.") if state["refusal"] else None

    def _is_compared(self, version: int, query: Mapping[str, str]) -> bool:
        """Whether it is the trainer that wrote ``version`` who says that it has compared."""
        return (query.get("compared"), query.get("channel")) == (str(version), self._uncompared.get(version))

    @staticmethod
    def _not_compared(version: int) -> str:
        return f"the trainer of policy version {version} has not said that it compared bytes (compared={version}, channel): publish again"

    async def _refuse_while_paused(self, engine: Any) -> None:
        # Requests would only queue, for ever if the trainer dies; those in flight still carry their version.
        state = await self._ask(engine)
        self._state = {**state, "refusal": state["refusal"] or PAUSED}

    async def _ask(self, engine: Any) -> dict[str, Any]:
        """State of the weights; the first rank that refuses speaks for all."""
        state = self._state
        if state is None:
            states = await engine.collective_rpc("weight_state")
            # An update may have begun while the workers answered; its mark must stay.
            state = self._state = self._state or _merged(states)
        return state


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say; the first that refuses speaks for all."""
    answer = next((state for state in states if state["refusal"]), states[0])
    if not answer["refusal"] and any(state["policy_version"] != answer["policy_version"] for state in states):
        return {"policy_version": None, "refusal": "the ranks hold different policy versions: publish again"}
    return answer


def _came_to_nothing(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no worker has written anything."""
    return all(result.get("unprepared") or result.get("disarmed") or result.get("untouched") for result in results)


async def _while_alive(engine: Any, call: Awaitable[Any]) -> Any:
    """What ``call`` of the engine returns; RuntimeError once the engine has died, at which vLLM ends no call that waits for its core."""
    task = asyncio.ensure_future(call)
    while not (await asyncio.wait({task}, timeout=_ALIVE_S))[0]:
        if engine.errored:
            task.cancel()
            await asyncio.wait({task})
            raise RuntimeError("The engine died during a weight update: start the server again.")
    return task.result()
