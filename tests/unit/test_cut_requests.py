"""A request that is cut leaves vLLM's engine at once: the real wrapper of vLLM's handlers, and one that streams."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from e2e_fp8.rollout.comparison import Comparison
from e2e_fp8.rollout.in_flight import InFlight, Receive


class Application:
    """One route as vLLM has them: its handler runs in a task that only a client's departure ends."""

    def __init__(self, *, fails: bool = False) -> None:
        self.running, self.ended, self.fails = 0, "", fails

    async def generate(self, length: int = 10**6):
        self.running += 1
        try:
            for token in range(length):
                await asyncio.sleep(1e-3)
                yield f"{token} "
            self.ended = "complete"
        except (asyncio.CancelledError, GeneratorExit):
            self.ended = "aborted"
            raise
        finally:
            self.running -= 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = Request(scope, receive)
        length = int(await raw.body())

        @with_cancellation
        async def handler(request: None, raw_request: Request) -> JSONResponse:
            return JSONResponse([token async for token in self.generate(length)])

        if scope["path"] == "/stream":
            response = StreamingResponse(self.generate(length))
        else:
            response = await handler(None, raw)
            if response is None and self.fails:
                raise RuntimeError("the client has gone")
        # as FastAPI does with what a handler did not answer
        await (response or JSONResponse(None))(scope, receive, send)


def request_of(path: str, length: int) -> tuple[dict[str, Any], Receive]:
    """Scope and messages of a client that asks for so many tokens and stays."""
    body = [{"type": "http.request", "body": str(length).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "asgi": {"spec_version": "2.3"}}, receive


async def served(application: Application, path: str, length: int, *, cut_after_s: float | None) -> tuple[str, list[dict[str, Any]]]:
    """What ``InFlight.run`` returns, and what was sent, of a request whose comparison fails after so long, or passes at once."""
    sent: list[dict[str, Any]] = []
    scope, receive = request_of(path, length)

    async def send(message: Any) -> None:
        sent.append(message)

    comparison = Comparison(1, 60.0, lambda: None)
    in_flight = InFlight()
    running = asyncio.create_task(in_flight.run(application, scope, receive, send, 1, comparison))
    if cut_after_s is None:
        comparison.end()
    else:
        await asyncio.sleep(cut_after_s)
        assert in_flight.has_some()
        comparison.end("bytes differ")
    reason = await asyncio.wait_for(running, 5)
    assert not in_flight.has_some()
    return reason, sent


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/stream"])
def test_a_cut_request_leaves_the_engine_and_nothing_of_it_is_sent(path, fails):
    application = Application(fails=fails)
    reason, sent = asyncio.run(served(application, path, 10**6, cut_after_s=0.05))
    assert (reason, sent) == ("bytes differ", [])
    # a stream begins to generate when its answer has begun
    assert (application.running, application.ended) == (0, "aborted" if path == "/generate" else "")


@pytest.mark.parametrize("path", ["/generate", "/stream"])
def test_a_request_that_is_not_cut_is_answered_whole(path):
    application = Application()
    reason, sent = asyncio.run(served(application, path, 5, cut_after_s=None))
    assert reason == ""
    assert (application.running, application.ended) == (0, "complete")
    assert sent[0]["type"] == "http.response.start"
    assert (b"x-policy-version", b"1") in sent[0]["headers"]
    assert b"4 " in b"".join(message.get("body", b"") for message in sent)


def test_a_tick_is_not_enough_without_the_word_that_the_client_has_gone():
    """Why ``cut`` does more than to cancel: vLLM's wrapper leaves its handler's task alone when it is cancelled itself."""

    async def scenario() -> str:
        application = Application()
        scope, receive = request_of("/generate", 10**6)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        task = asyncio.create_task(application(scope, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0.05)
        return "still runs" if application.running else application.ended

    assert asyncio.run(scenario()) == "still runs"
