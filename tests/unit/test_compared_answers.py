"""Generation that goes on before bytes are compared: no answer leaves before the trainer has said that they are equal."""

import asyncio
import json
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from guarded_server import CHANNEL, TOKEN_S, Answer, Server, serve

from e2e_fp8.rollout.asgi import answer_request
from e2e_fp8.rollout.paused_call import paused_call

__all__ = ["serve"]
MODES = ("wait", "abort", None)


def step(version: int, **fields) -> bytes:
    usual = {"policy_version": version, "channel": CHANNEL, "compare": True, "resume": True, "patience_s": 30.0}
    return json.dumps(usual | fields).encode()


async def update(
    server: Server, version: int, mode: str | None = "wait", patience_s: float = 30.0, *, channel: str = CHANNEL, resume: bool = True
) -> None:
    """An update whose bytes are to be compared while the engine generates; without ``mode`` its last step is one of several."""
    if mode is None:
        begun = step(version, resume=False, patience_s=0.0, channel=channel)
        assert (await server.call("/weight_update?pause=wait", begun)).status == 200
        assert server.engine.paused
    route = "/weight_update" if mode is None else f"/weight_update?pause={mode}"
    assert (await server.call(route, step(version, resume=resume, patience_s=patience_s, channel=channel))).status == 200
    assert server.engine.paused != resume


async def begun(server: Server, route: str = "/generate") -> "asyncio.Task[Answer]":
    """A request whose tokens have all been made and that is not answered."""
    task = asyncio.create_task(server.call(route))
    await asyncio.sleep(0.05)
    assert not server.engine.requests
    assert not task.done()
    return task


@pytest.mark.parametrize("mode", MODES)
def test_answers_wait_for_the_comparison(mode, serve):
    async def scenario(server: Server) -> None:
        await update(server, 1, mode)
        held, streamed = await begun(server), await begun(server, "/generate?stream=1")
        assert (await server.compared(1)).status == 200
        for answer in (await held, await streamed, await server.call("/generate")):
            assert answer.check() == "1"

    serve(scenario)


def test_a_difference_refuses_them_and_what_comes_later(serve):
    """Nothing of what wrong bytes made is sent, not even that an answer begins; the next update serves."""

    async def scenario(server: Server) -> None:
        await update(server, 1)
        held, streamed = await begun(server), await begun(server, "/generate?stream=1")
        running = asyncio.create_task(server.call("/generate?tokens=100000"))
        await asyncio.sleep(0.01)
        assert (await server.call("/refuse_generation", b'{"reason": "the receipt of policy version 1 failed"}')).status == 200
        for answer in (await held, await streamed, await running, await server.call("/generate")):
            assert answer.status == 503
            assert "the receipt of policy version 1 failed" in answer.body
        await asyncio.sleep(2 * TOKEN_S)
        assert not server.engine.requests
        assert (await server.call("/resume")).status == (await server.compared(1)).status == 409
        await update(server, 2)
        held = await begun(server)
        assert (await server.compared(2)).status == 200
        assert (await held).check() == "2"

    serve(scenario)


def test_a_trainer_that_says_nothing_is_waited_for_so_long_and_no_longer(serve):
    async def scenario(server: Server) -> None:
        await update(server, 1, patience_s=0.2)
        held = await begun(server)
        answer = await asyncio.wait_for(held, 1)
        assert answer.status == 503
        assert "did not say in time" in answer.body
        for _ in range(2):
            answer = await server.call("/generate")
            assert answer.status == 503
            assert "the trainer of policy version 1 has not said that it compared bytes" in answer.body
        assert (await server.call("/resume")).status == 409
        assert (await server.compared(1)).status == 200, "late, and still true"
        assert (await server.call("/generate")).check() == "1"

    serve(scenario)


def test_another_update_before_the_word_refuses_them(serve):
    async def scenario(server: Server) -> None:
        await update(server, 1)
        held = await begun(server)
        await update(server, 2)
        answer = await held
        assert answer.status == 503
        assert "policy version 1 is not used: another update came" in answer.body
        held = await begun(server)
        assert (await server.compared(2)).status == 200
        assert (await held).check() == "2"
        await update(server, 3)
        held = await begun(server)
        assert (await server.call("/start_weight_update")).status == 409, "generation runs"
        # what /pause does; the application here has no routes but generation
        await server.engine.pause_generation("wait", True)
        assert (await server.call("/start_weight_update?tokens=0")).status == 200
        assert (await held).status == 503

    serve(scenario)


def test_nobody_else_speaks_for_the_trainer(serve):
    async def scenario(server: Server) -> None:
        await update(server, 7)
        held = await begun(server)
        for route in ("/resume", "/resume?compared=7", f"/resume?compared=6&channel={CHANNEL}"):
            answer = await server.call(route)
            assert answer.status == 409
            assert "compared=7" in answer.body
        answer = await server.call("/sleep?level=1")
        assert answer.status == 409
        assert "still compared" in answer.body
        assert not held.done()
        assert (await server.compared(7)).status == 200
        assert (await held).check() == "7"

    serve(scenario)


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_trainers_with_one_version_the_later_ones_word_counts(resume, serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="first", resume=resume)
        early = await begun(server) if resume else None
        await update(server, 5, channel="second", resume=resume)
        assert early is None or (await early).status == 503
        held = await begun(server) if resume else None
        assert (await server.compared(5, "first")).status == 409
        assert (await server.call("/generate")).status == 503 if held is None else not held.done()
        assert (await server.compared(5, "second")).status == 200
        assert (await (held or asyncio.create_task(server.call("/generate")))).check() == "5"

    serve(scenario)


def test_a_step_that_came_to_nothing_takes_no_word_away(serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="first", resume=False)
        server.engine.unprepared = True
        assert (await server.call("/weight_update", step(5, channel="second", resume=False))).status == 200
        server.engine.unprepared = False
        assert (await server.compared(5, "second")).status == 409
        assert (await server.compared(5, "first")).status == 200
        assert (await server.call("/generate")).check() == "5"

    serve(scenario)


def test_an_update_that_another_overtook_takes_no_word_away(serve):
    """The later trainer's next step finds no update of its own any more."""

    async def scenario(server: Server) -> None:
        await server.call("/weight_update?pause=wait", step(5, channel="late", resume=False, begin=True))
        await server.call("/weight_update?pause=wait", step(5, channel="writer", resume=False, begin=True))
        for server.engine.refused, server.engine.unprepared in ((True, False), (False, True)):
            await server.call("/weight_update", step(5, channel="late", resume=False, begin=False))
        server.engine.refused = server.engine.unprepared = False
        assert (await server.compared(5, "late")).status == 409
        assert (await server.compared(5, "writer")).status == 200

    serve(scenario)


def test_two_steps_at_once_that_came_to_nothing_take_no_word_away(serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="writer", resume=False)
        server.engine.unprepared = True
        steps = [
            asyncio.create_task(server.call("/weight_update?pause=wait", step(5, channel=name, resume=False))) for name in ("one", "two")
        ]
        assert [(await each).status for each in steps] == [200, 200]
        server.engine.unprepared = False
        assert [(await server.compared(5, name)).status for name in ("one", "two", "writer")] == [409, 409, 200]

    serve(scenario)


@pytest.mark.parametrize("fields", [{"channel": None}, {"channel": 7}, {"policy_version": "five"}])
def test_a_step_that_names_no_channel_or_version_takes_no_word_away(fields, serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="writer", resume=False)
        server.engine.refused = True
        assert (await server.call("/weight_update?pause=wait", step(5, resume=False, **fields))).status == 200
        server.engine.refused = False
        for channel in ("None", "7", ""):
            assert (await server.compared(5, channel)).status == 409
        assert (await server.compared(5, "writer")).status == 200

    serve(scenario)


def with_verbs(server: Server, *, status: int = 200, version: int = 6, finish_s: float = 0.0) -> None:
    """Have the server finish updates by vLLM's own verb, as ``version``."""
    generate = server.guard._app

    async def application(scope, receive, send) -> None:
        if scope["path"] != "/finish_weight_update":
            await generate(scope, receive, send)
            return
        if status == 200:
            server.engine.version, server.engine.refusal = version, ""
        await asyncio.sleep(finish_s)
        await answer_request(send, status, {})

    server.guard._app = application


@pytest.mark.parametrize("status", [200, 500])
def test_whole_weights_by_vllms_verbs_need_nobodys_word(status, serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="writer", resume=False)
        with_verbs(server, status=status)
        assert (await server.call("/finish_weight_update")).status == status
        assert (await server.call("/resume")).status == (200 if status == 200 else 409)
        if status == 200:
            assert (await server.call("/generate")).check() == "6"

    serve(scenario)


@pytest.mark.parametrize("resume", [False, True])
def test_a_verb_that_is_answered_late_takes_no_mark_of_a_later_update_away(resume, serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="writer", resume=False)
        with_verbs(server, finish_s=0.2)
        finishing = asyncio.create_task(server.call("/finish_weight_update"))
        await asyncio.sleep(0.02)
        await update(server, 8, channel="later", resume=resume)
        assert (await finishing).status == 200
        assert (await server.call("/resume")).status == 409
        assert (await server.compared(8, "later")).status == 200
        assert (await server.call("/generate")).check() == "8"

    serve(scenario)


def test_a_step_that_failed_after_it_wrote_takes_the_word(serve):
    async def scenario(server: Server) -> None:
        await update(server, 5, channel="first", resume=False)
        call = server.engine.call_utility_async

        async def failing(*args):
            await call(*args)
            raise RuntimeError("a digest could not be begun")

        server.engine.call_utility_async = failing
        assert (await server.call("/weight_update?pause=wait", step(5, channel="second", resume=False))).status == 500
        assert (await server.compared(5, "first")).status == 409

    serve(scenario)


def test_steps_that_wrote_nothing_leave_no_mark(serve):
    """Two at once that the workers do not know, one whose version is no number, one that is refused before anything is written."""

    async def scenario(server: Server) -> None:
        await update(server, 5, channel="writer", resume=False)
        assert (await server.compared(5, "writer")).status == 200
        server.engine.unprepared = True
        steps = [asyncio.create_task(server.call("/weight_update?pause=wait", step(5, channel=name, resume=False))) for name in "ab"]
        assert [(await each).status for each in steps] == [200, 200]
        server.engine.unprepared, server.engine.untouched = False, True
        for version in (5, float("inf")):
            assert (await server.call("/weight_update?pause=wait", step(version, channel="c", resume=False))).status == 200
        server.engine.untouched = False
        assert (await server.call("/resume")).status == 200
        assert (await server.call("/generate")).check() == "5"

    serve(scenario)


def test_no_answer_is_of_bytes_that_were_not_compared_whatever_the_timing(serve):
    draw, compared = random.Random(random.getrandbits(64)), {0}

    async def one(server: Server) -> str | None:
        await asyncio.sleep(draw.random())
        route = f"/generate?tokenize={draw.random() * 0.05}&tokens={draw.randint(1, 12)}&stream={draw.randint(0, 1)}"
        answer = await server.call(route.replace("&stream=0", ""))
        if answer.status != 200 or not answer.body:
            return None
        version = answer.check()
        assert int(version) in compared
        return version

    async def scenario(server: Server) -> None:
        requests = [asyncio.create_task(one(server)) for _ in range(120)]
        for version in range(1, 9):
            await asyncio.sleep(0.02)
            await update(server, version, draw.choice(MODES))
            await asyncio.sleep(0.1 * draw.random())
            if draw.random() < 0.3:
                await server.call("/refuse_generation", b'{"reason": "bytes differ"}')
            else:
                compared.add(version)
                assert (await server.compared(version)).status == 200
        found = [version for version in await asyncio.gather(*requests) if version is not None]
        assert set(map(int, found)) <= compared

    serve(scenario)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("result", "goes_on"),
    [
        ({"state": {"policy_version": 3, "refusal": ""}}, True),
        ({"state": {"policy_version": None, "refusal": "torn"}}, False),
        ({"unprepared": True}, False),
        ({"disarmed": "cancelled"}, False),
        ({"error": "a sentence"}, False),
    ],
)
def test_a_core_goes_on_only_when_every_rank_holds_the_whole_update(waits, result, goes_on):
    whole = {"state": {"policy_version": 3, "refusal": ""}}
    paused: Future = Future()
    said: list[str] = []
    core = SimpleNamespace(
        pause_scheduler=lambda mode, clear: paused if waits else None,
        collective_rpc=lambda method, timeout, args: [whole, result],
        resume_scheduler=lambda: said.append("resumed"),
    )
    for resume in (False, True):
        answer = paused_call(core, "wait", "weight_update", ("{}",), resume)
        if waits:
            assert not answer.done()
            if not resume:
                continue
            paused.set_result(None)
            answer = answer.result()
        assert answer == [whole, result]
        assert said == (["resumed"] if resume and goes_on else [])


def test_of_two_updates_at_once_the_later_one_says_what_goes_on(serve):
    """The first is whole while the second is already at the engine, where it pauses again, and stays so."""

    async def scenario(server: Server) -> None:
        first = asyncio.create_task(server.call("/weight_update?pause=wait", step(2)))
        await asyncio.sleep(0)
        second = asyncio.create_task(server.call("/weight_update?pause=wait", step(3, resume=False)))
        assert ((await first).status, (await second).status) == (200, 200)
        assert server.engine.paused
        assert (await server.compared(2)).status == 409
        answer = await asyncio.wait_for(server.call("/generate"), 5)
        assert answer.status == 503, "nobody is going to compare before generation"
        assert (await server.compared(3)).status == 200
        assert not server.engine.paused
        assert (await server.call("/generate")).check() == "3"

    serve(scenario)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("compares", [False, True])
def test_a_step_that_the_workers_refuse_compares_nothing(compares, late, serve):
    """A step of an update that is none any more: what the engine holds is still of another trainer, who has not compared."""

    async def scenario(server: Server) -> None:
        if late:
            await update(server, 6, patience_s=0.01)
            await asyncio.sleep(0.02)
        else:
            assert (await server.call("/weight_update?pause=wait", step(6, resume=False))).status == 200
        server.engine.refused = True
        route = "/weight_update?pause=wait" if late else "/weight_update"
        assert (await server.call(route, step(5, compare=compares, resume=False))).status == 200
        server.engine.refused = False
        assert (await server.call("/resume")).status == 409
        answer = await server.call("/generate")
        assert answer.status == 503
        assert (await server.compared(6)).status == 200
        assert (await server.call("/generate")).check() == "6"

    serve(scenario)


def test_vllms_own_verbs_compare_nothing(serve):
    async def scenario(server: Server) -> None:
        assert (await server.call("/weight_update?pause=wait", step(6, resume=False))).status == 200
        # refused by the workers, who have nothing prepared
        await server.call("/start_weight_update?tokens=0")
        answer = await server.call("/resume")
        assert answer.status == 409
        assert "compared=6" in answer.body
        assert (await server.call("/generate")).status == 503
        # long enough for an update to begin and end meanwhile, which a core that answers in order does not allow
        server.engine.is_paused_s = 0.05
        ask = asyncio.create_task(server.call("/start_weight_update?tokens=0"))
        await asyncio.sleep(0)
        assert (await server.call("/weight_update?pause=wait", step(7))).status == 200
        assert (await ask).status == 409
        held = await begun(server)
        assert (await server.compared(7)).status == 200
        assert (await held).check() == "7"

    serve(scenario)
