"""A small engine that really interleaves, behind the real guard: its weights are a number, and so are the tokens that it makes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

from e2e_fp8.rollout.paused_call import METHOD
from e2e_fp8.rollout.server_process import EXTENSION
from e2e_fp8.rollout.token_guard import TokenGuard

TOKEN = "0123456789abcdef"
CHANNEL = "feed"
TOKEN_S = 2e-3


class Engine:
    """Weights that are a number, and requests whose tokens are the number that was there when each was made."""

    def __init__(self) -> None:
        self.version, self.paused, self.requests = 0, False, set[int]()
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: bool(self.requests))
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.engine_core, self.errored, self.refusal = self, False, ""
        self.refused = self.unprepared = self.untouched = False
        """Whether workers refuse the next steps of updates, or know nothing of them, or refuse them with their weights as they were."""
        self.is_paused_s = 0.0
        self.one_call = asyncio.Lock()
        """A core takes one call after another."""

    async def generate(self, request: int, length: int):
        self.requests.add(request)
        try:
            started = False
            for _ in range(length):
                while self.paused and not started:
                    await asyncio.sleep(TOKEN_S)
                started = True
                await asyncio.sleep(TOKEN_S)
                if request not in self.requests:
                    return
                yield self.version
        finally:
            self.requests.discard(request)

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused, running = True, set(self.requests)
        if mode == "abort":
            self.requests -= running
        while self.requests & running:
            await asyncio.sleep(TOKEN_S)

    async def is_paused(self) -> bool:
        paused = self.paused
        await asyncio.sleep(self.is_paused_s)
        return paused

    async def resume_generation(self) -> None:
        self.paused = False

    async def never(self, *args: Any) -> None:
        await asyncio.Event().wait()

    async def call_utility_async(self, name: str, mode: str, method: str, args: tuple[str], resume: bool) -> list[dict[str, Any]]:
        assert (name, method) == (METHOD, "weight_update")
        async with self.one_call:
            await self.pause_generation(mode, True)
            await asyncio.sleep(TOKEN_S)
            results = self.written(args[0])
            if resume and "error" not in results[0]:
                self.paused = False
            return results

    def written(self, step: str) -> list[dict[str, Any]]:
        if self.refused:
            return [{"error": "no such update"}]
        if self.untouched:
            return [{"error": "no such shape", "untouched": True}]
        if self.unprepared:
            return [{"unprepared": True}]
        self.version, self.refusal = json.loads(step)["policy_version"], ""
        return [{"seconds": 0.0, "state": self.state()}]

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        await asyncio.sleep(TOKEN_S)
        if method == "refuse_generation":
            (self.refusal,) = args
            return [{}]
        if method == "weight_update":
            return self.written(args[0])
        assert method == "weight_state"
        return [self.state()]

    def state(self) -> dict[str, Any]:
        return {"policy_version": None if self.refusal else self.version, "refusal": self.refusal}


class Server:
    """Guard, application and engine; a request's query says how long each stage takes."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.guard = TokenGuard(self.application)
        self.state = SimpleNamespace(engine_client=self.engine, args=SimpleNamespace(worker_extension_cls=EXTENSION))
        self.count = 0

    async def application(self, scope, receive, send) -> None:
        wanted = {name: float(values[0]) for name, values in parse_qs(scope["query_string"].decode()).items()}
        self.count += 1
        request, start = self.count, {"type": "http.response.start", "status": 200, "headers": []}
        if streams := bool(wanted.get("stream")):
            await send(start)
        await asyncio.sleep(wanted.get("tokenize", 0))
        tokens = []
        async for token in self.engine.generate(request, int(wanted.get("tokens", 3))):
            tokens.append(token)
            if streams:
                await send({"type": "http.response.body", "body": f"{token} ".encode(), "more_body": True})
        await asyncio.sleep(wanted.get("serialize", 0))
        if not streams:
            await send(start)
        await send({"type": "http.response.body", "body": b"" if streams else " ".join(map(str, tokens)).encode()})

    async def call(self, route: str, body: bytes = b"{}", *, read_s: float = 0.0, kind: str = "http") -> "Answer":
        path, _, query = route.partition("?")
        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": kind, "method": "POST", "path": path, "query_string": query.encode(), "headers": headers, "app": self}
        answer = Answer()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], dict(message["headers"])
            elif message["type"] == "http.response.body":
                answer.body += message["body"].decode()
                answer.is_whole = not message.get("more_body", False)
            else:
                answer.other = message
            await asyncio.sleep(read_s)

        await self.guard(scope, receive, send)
        return answer

    async def compared(self, version: int, channel: str = CHANNEL) -> "Answer":
        """The word of the trainer that wrote over ``channel``."""
        return await self.call(f"/resume?compared={version}&channel={channel}")

    async def update(self, version: int, mode: str = "wait") -> None:
        step = json.dumps({"policy_version": version, "compare": False}).encode()
        assert (await self.call(f"/weight_update?pause={mode}", step)).status == 200
        assert (await self.call("/resume")).status == 200


class Answer:
    status, body, is_whole, other = 0, "", False, None

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}

    def check(self) -> str:
        """The one version of all its tokens, which is the one that it names."""
        assert self.status == 200, self.body
        (named,) = {int(word) for word in self.body.split()}
        assert self.headers[b"x-policy-version"] == str(named).encode()
        return str(named)


@pytest.fixture
def serve(monkeypatch):
    """``serve(scenario)``: runs a coroutine function that is given a new server at version 0."""
    monkeypatch.setenv("E2E_FP8_TOKEN", TOKEN)
    monkeypatch.delenv("E2E_FP8_TOKEN_FILE", raising=False)

    def run(scenario: Callable[[Server], Awaitable[None]]) -> None:
        asyncio.run(asyncio.wait_for(scenario(Server()), 60))

    return run
