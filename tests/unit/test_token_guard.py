"""The guard in front of a small engine that really interleaves: every answer is of one policy version and says which."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

from e2e_fp8.rollout.paused_call import METHOD
from e2e_fp8.rollout.token_guard import TokenGuard

TOKEN = "0123456789abcdef"
TOKEN_S = 2e-3


class Engine:
    """Weights that are a number, and requests whose tokens are the number that was there when each was made."""

    def __init__(self) -> None:
        self.version, self.paused, self.requests = 0, False, set[int]()
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: bool(self.requests))
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.engine_core, self.errored, self.refusal = self, False, ""

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
        return self.paused

    async def resume_generation(self) -> None:
        self.paused = False

    async def never(self, *args: Any) -> None:
        await asyncio.Event().wait()

    async def call_utility_async(self, name: str, mode: str, method: str, args: tuple[str]) -> list[dict[str, Any]]:
        assert (name, method) == (METHOD, "weight_update")
        await self.pause_generation(mode, True)
        await asyncio.sleep(TOKEN_S)
        self.version = json.loads(args[0])["policy_version"]
        return [{"seconds": 0.0, "state": self.state()}]

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "weight_state"
        await asyncio.sleep(TOKEN_S)
        return [self.state()]

    def state(self) -> dict[str, Any]:
        return {"policy_version": self.version, "refusal": self.refusal}


class Server:
    """Guard, application and engine; a request's query says how long each stage takes."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.guard = TokenGuard(self.application)
        self.state = SimpleNamespace(engine_client=self.engine, args=SimpleNamespace())
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


def test_a_wait_lets_a_request_that_is_still_tokenized_run_under_its_own_version(serve):
    async def scenario(server: Server) -> None:
        late = asyncio.create_task(server.call("/generate?tokenize=0.05"))
        await asyncio.sleep(0.01)
        await server.update(1)
        assert (await late).check() == "0"
        assert (await server.call("/generate")).check() == "1"

    serve(scenario)


def test_a_request_that_reaches_a_paused_engine_is_refused_not_run_later(serve):
    """Beside one that is aborted, whose tokens so far are whole and of its version."""

    async def scenario(server: Server) -> None:
        running = asyncio.create_task(server.call("/generate?tokens=1000"))
        late = asyncio.create_task(server.call("/generate?tokenize=0.05"))
        await asyncio.sleep(0.03)
        await server.update(1, "abort")
        assert (await running).check() == "0"
        refused = await late
        assert refused.status == 503
        assert "Generation refused: generation is paused for a weight update." in refused.body
        assert (await server.call("/generate")).check() == "1"

    serve(scenario)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_answer_that_is_written_while_the_update_begins_keeps_its_stamp(mode, serve):
    async def scenario(server: Server) -> None:
        slow = asyncio.create_task(server.call("/generate?serialize=0.1"))
        await asyncio.sleep(0.05)
        await server.update(1, mode)
        assert (await slow).check() == "0"

    serve(scenario)


def test_vllms_own_verbs_cut_it_too(serve):
    async def scenario(server: Server) -> None:
        late = asyncio.create_task(server.call("/generate?tokenize=0.05"))
        await asyncio.sleep(0.01)
        # what /pause does; the application here has no routes but generation
        await server.engine.pause_generation("wait", True)
        assert (await server.call("/start_weight_update?tokens=0")).status == 200
        assert (await late).status == 503

    serve(scenario)


def test_an_update_of_an_engine_that_is_paused_does_not_wait_for_a_request_that_it_holds(serve):
    async def scenario(server: Server) -> None:
        late = asyncio.create_task(server.call("/generate?tokenize=0.05"))
        await asyncio.sleep(0.01)
        await server.engine.pause_generation("wait", True)
        await asyncio.sleep(0.1)
        assert server.engine.requests
        await server.update(1)
        assert (await late).status == 503
        assert (await server.call("/generate")).check() == "1"

    serve(scenario)


def test_an_engine_that_dies_under_an_update_ends_it(serve):
    async def scenario(server: Server) -> None:
        server.engine.call_utility_async = server.engine.never  # type: ignore[method-assign]
        update = asyncio.create_task(server.call("/weight_update?pause=wait", b'{"policy_version": 1, "compare": false}'))
        await asyncio.sleep(1.2)
        assert not update.done()
        server.engine.errored = True
        answer = await asyncio.wait_for(update, 3)
        assert answer.status == 500
        assert "The engine died during a weight update" in answer.body

    serve(scenario)


@pytest.mark.parametrize("flags", ["", "announced"])
@pytest.mark.parametrize(
    ("results", "refusal", "resumed"),
    [
        (
            RuntimeError("a message was cut off"),
            "the update began and has not finished",
            "Cannot resume: the update began and has not finished.",
        ),
        ([{"unprepared": True}], "", "resumed"),
        ([{"state": {"policy_version": 1, "refusal": ""}}], "", "the trainer of policy version 1 has not said that it compared bytes"),
    ],
    ids=["fails", "unprepared", "finishes"],
)
def test_an_update_is_over_before_anything_that_the_engine_answers_after_it(results, refusal, resumed, flags, serve):
    """A busy front end finds both answers at once, the later one's client is quick, and the trainer is slow to take its own."""

    async def scenario(server: Server) -> None:
        engine, step = server.engine, {"policy_version": 1, "compare": True, "flags": flags}
        update_ended, state_told = (asyncio.get_running_loop().create_future() for _ in range(2))
        engine.call_utility_async = lambda *_: update_ended  # type: ignore[method-assign]
        update = asyncio.create_task(server.call("/weight_update?pause=wait", json.dumps(step).encode(), read_s=0.2))

        async def quick() -> Answer:
            await state_told
            return await server.call("/resume")

        asked = asyncio.create_task(quick())
        await asyncio.sleep(0.05)
        early = await server.call("/resume")
        assert early.status == 409
        assert ("A trainer has announced a weight update" if flags else "a weight update is under way") in early.body
        engine.refusal = refusal
        if isinstance(results, Exception):
            update_ended.set_exception(results)
        else:
            update_ended.set_result(results)
        state_told.set_result(None)
        answer = await asked
        assert resumed in answer.body
        assert answer.status == (200 if resumed == "resumed" else 409)
        assert not update.done()
        assert (await update).status == (500 if isinstance(results, Exception) else 200)

    serve(scenario)


def test_what_answers_before_the_engine_has_the_request_is_refused(serve):
    async def scenario(server: Server) -> None:
        answer = await server.call("/v1/responses")
        assert answer.status == 503
        assert "/v1/responses is not served" in answer.body
        assert server.count == 0

    serve(scenario)


def test_several_engines_behind_one_front_end_are_refused(serve):
    async def scenario(server: Server) -> None:
        server.state.args.data_parallel_size = 2
        for route in ("/generate", "/weight_update?pause=wait", "/resume"):
            answer = await server.call(route)
            assert answer.status == 503
            assert "one engine" in answer.body

    serve(scenario)


def test_an_update_that_begins_while_another_resumes_keeps_its_mark(serve):
    """A bare resume must not let bytes serve that their trainer was going to compare."""

    async def scenario(server: Server) -> None:
        await server.update(1)
        resume, begins = server.engine.resume_generation, asyncio.Event()

        async def slow() -> None:
            begins.set()
            await asyncio.sleep(0.1)
            await resume()

        server.engine.resume_generation = slow  # type: ignore[method-assign]
        resuming = asyncio.create_task(server.call("/resume"))
        await begins.wait()
        assert (await server.call("/weight_update?pause=wait", b'{"policy_version": 2, "compare": true}')).status == 200
        assert (await resuming).status == 200
        assert (await server.call("/resume")).status == 409
        assert (await server.call("/resume?compared=2")).status == 200

    serve(scenario)


def test_a_client_that_reads_slowly_does_not_hold_the_update_up(serve):
    async def scenario(server: Server) -> None:
        slow = asyncio.create_task(server.call("/generate?stream=1&tokens=4", read_s=0.5))
        await asyncio.sleep(0.9)
        server.engine.requests.clear()
        before = asyncio.get_running_loop().time()
        await server.update(1)
        assert asyncio.get_running_loop().time() - before < 0.4
        assert not slow.done()
        assert (await slow).check() == "0"

    serve(scenario)


def test_a_session_without_an_end_is_refused(serve):
    async def scenario(server: Server) -> None:
        answer = await server.call("/v1/realtime", kind="websocket")
        assert answer.other == {
            "type": "websocket.close",
            "code": 1008,
            "reason": "WebSockets are not served: a session would outlive its policy version.",
        }

    serve(scenario)


def test_no_answer_mixes_versions_whatever_the_timing(serve):
    draw = random.Random(random.getrandbits(64))

    async def one(server: Server) -> str | None:
        await asyncio.sleep(draw.random())
        stages = f"tokenize={draw.random() * 0.05}&serialize={draw.random() * 0.05}&tokens={draw.randint(1, 12)}"
        answer = await server.call(f"/generate?{stages}&stream={draw.randint(0, 1)}".replace("&stream=0", ""))
        if answer.status != 200 or not answer.body:
            return None
        return answer.check()

    async def scenario(server: Server) -> None:
        requests = [asyncio.create_task(one(server)) for _ in range(120)]
        for version in range(1, 7):
            await asyncio.sleep(0.1)
            await server.update(version, draw.choice(["wait", "abort"]))
        found = [version for version in await asyncio.gather(*requests) if version is not None]
        assert len(set(found)) > 1

    serve(scenario)
