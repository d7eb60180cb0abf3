"""The guard in front of a small engine that really interleaves: every answer is of one policy version and says which."""

import asyncio
import json
import random

import pytest
from guarded_server import CHANNEL, Answer, Server, serve

from e2e_fp8.rollout.asgi import answer_request, body_of
from e2e_fp8.rollout.token_guard import TokenGuard

__all__ = ["serve"]


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
        engine, step = server.engine, {"policy_version": 1, "channel": CHANNEL, "compare": True, "flags": flags}
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize(
    "method", ["load_model", "weight_update", "refuse_generation", "_start_weight_update", "__setattr__", "", None, ["receipt"]]
)
def test_methods_that_change_weights_unseen_are_refused(method, encoding, serve):
    async def scenario(server: Server) -> None:
        answer = await server.call("/collective_rpc", json.dumps({"method": method, "args": []}).encode(encoding))
        assert (answer.status, server.count) == (409, 0)
        assert repr(method) in answer.body

    serve(scenario)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
@pytest.mark.parametrize(
    "method", ["describe_worker", "weight_state", "prepare_update", "receipt", "sealed_receipt", "open_flags", "close_channel"]
)
def test_other_methods_of_the_extension_reach_vllm_as_they_were_sent(method, encoding, serve):
    async def scenario(server: Server) -> None:
        seen = []

        async def application(scope, receive, send) -> None:
            seen.append(await body_of(receive))
            seen.append(await receive())
            await answer_request(send, 200, {})

        server.guard = TokenGuard(application)
        body = json.dumps({"method": method, "args": ["\u00e9"]}).encode(encoding)
        assert (await server.call("/collective_rpc", body)).status == 200
        # what comes after the body is the server's own, which tells of a client that goes
        assert seen == [body, {"type": "http.request", "body": body}]

    serve(scenario)


def test_what_the_guard_reads_otherwise_than_vllm_is_refused(serve):
    async def scenario(server: Server) -> None:
        for route in ("/pause?mode=wait&mode=keep", "/sleep?level=02", "/sleep?level=1&level=3"):
            assert (await server.call(route)).status == 409
        assert (await server.call("/sleep?level=1&level=2")).status == 200
        assert server.engine.refusal.startswith("sleep level 2")
        server.state.args.root_path = "/behind"
        answer = await server.call("/behind/pause?mode=keep")
        assert (answer.status, "--root-path" in answer.body) == (503, True)

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
        assert (await server.call("/weight_update?pause=wait", b'{"policy_version": 2, "compare": true, "channel": "feed"}')).status == 200
        assert (await resuming).status == 200
        assert (await server.call("/resume")).status == 409
        assert (await server.compared(2)).status == 200

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
