"""Weights from one process into a real vLLM server in others, over every transport, with either side killed on the way."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration import armed_cases, compared_cases
from integration.server_cases import Served, assert_live, case_config, exported, generate, own_shares, random_weights, shares_publisher
from integration.torn_cases import await_torn, check_trainer_killed, kill, kill_server

from e2e_fp8.errors import ByteMismatchError, EngineError, LayoutError
from e2e_fp8.rollout.agreement import check_agreement
from e2e_fp8.sync.direct import DirectSender
from e2e_fp8.sync.flags import TrainerFlags
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.point_to_point import send
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.types import ExportedTensor

CFG = case_config()
FIRST, SECOND = random_weights(CFG, 11), random_weights(CFG, 12)
TRANSPORTS = ("ipc", "nccl", "disk")
SYNC_PHASES = ("plan", "prepare", "open", "stage", "send")
pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(CFG, tmp_path_factory.mktemp("served"))
    yield served
    served.process.close()


def test_without_weights_generation_is_refused(served):
    with pytest.raises(EngineError, match=r"\(503\): Generation refused: the rollout server has no weights yet"):
        generate(served.client)


def test_workers_agree_with_the_plan_and_disagreements_are_named(served):
    publisher = served.publisher("ipc")
    check_agreement(CFG, publisher.workers)
    other = CFG.model_copy(update={"numerics": CFG.numerics.model_copy(update={"scale_format": "pow2"})})
    with pytest.raises(EngineError, match="power_2_scale is True in the trainer's plan and False at rollout rank 0"):
        check_agreement(other, publisher.workers)
    kept = (*CFG.numerics.high_precision_modules, "*.o_proj")
    other = CFG.model_copy(update={"numerics": CFG.numerics.model_copy(update={"high_precision_modules": kept})})
    with pytest.raises(EngineError, match=r"model.layers.0.self_attn.o_proj is bf16 in the trainer's plan and fp8 at rollout rank 0"):
        check_agreement(other, publisher.workers)
    publisher.close()


@pytest.mark.parametrize("transport", [*TRANSPORTS, "ipc without buckets"])
def test_delivered_bytes_are_live_and_generation_follows(served, transport):
    publisher, answers = served.publisher(transport), []
    for version, weights in ((1, FIRST), (2, SECOND), (3, FIRST)):
        report = publisher.publish(exported(weights), policy_version=version)
        assert report.receipt is not None
        assert report.num_bytes == sum(t.numel() * t.element_size() for t in weights.values())
        assert served.versions() == [version]
        assert_live(served, weights)
        answers.append(generate(served.client))
        assert sum(s for phase, s in report.phases.items() if phase in SYNC_PHASES) == pytest.approx(report.seconds)
    assert answers[0] == answers[2] != answers[1]
    publisher.close()


@pytest.mark.parametrize("transport", ["ipc", "nccl", "ipc without buckets"])
def test_the_same_tuple_again_is_known_but_its_bytes_are_read_anew(served, transport):
    """Written in place; then one tensor moves under the same tuple; then another trainer has published meanwhile."""
    publisher = served.publisher(transport)
    weights = {name: tensor.clone() for name, tensor in FIRST.items()}
    entries = tuple(ExportedTensor(name=name, tensor=tensor) for name, tensor in weights.items())
    for version, wanted in enumerate((FIRST, SECOND, FIRST, SECOND, FIRST), start=20):
        for name, tensor in wanted.items():
            weights[name].copy_(tensor)
        publisher.publish(entries, policy_version=version)
        assert_live(served, wanted)
    name, moved = "model.norm.weight", SECOND["model.norm.weight"].clone()
    weights[name].data = moved
    publisher.publish(entries, policy_version=30)
    assert_live(served, FIRST | {name: moved})
    served.publish("ipc", SECOND, 31)
    for version in (32, 33, 34):
        publisher.publish(entries, policy_version=version)
        assert_live(served, FIRST | {name: moved})
    publisher.close()


def test_rows_of_a_trainer_rank_go_straight_into_the_engine(served, monkeypatch):
    served.publish("ipc", FIRST, 4)
    answers = [generate(served.client)]
    publisher = shares_publisher(served.process.url, served.process.token, CFG, torch.device("cpu"))
    for version, weights in ((5, SECOND), (6, FIRST)):
        tensors, scales = own_shares(CFG, weights)
        report = publisher.publish(tensors, scales, policy_version=version)
        assert report.receipt is not None
        assert report.num_bytes == sum(t.nbytes for t in weights.values())
        assert served.versions() == [version]
        assert_live(served, weights)
        answers.append(generate(served.client))
    assert answers[0] == answers[2] != answers[1]
    # another trainer publishes meanwhile: noticed before anything is sent, and prepared once more
    served.publish("nccl", SECOND, 7)
    publisher.publish(tensors, scales, policy_version=8)
    assert_live(served, FIRST)
    name = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"

    def sent_then_changed(*args, **kwargs):
        sent = send(*args, **kwargs)
        tensors[0][name].view(torch.uint8)[5, 7] ^= 1
        return sent

    monkeypatch.setattr("e2e_fp8.sync.rank_publisher.send", sent_then_changed)
    with pytest.raises(ByteMismatchError, match=r"1 pieces .* model.layers.1.mlp.experts.routed_experts.w13_weight\[2\]\[0:\d+,0:\d+\]@0"):
        publisher.publish(tensors, scales, policy_version=9)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="the receipt of policy version 9 failed"):
        served.client.post("/resume")
    tensors[0][name] = tensors[0][name][:-1]
    with pytest.raises(LayoutError, match="A tensor has shape"):
        publisher.publish(tensors, scales, policy_version=10)
    tensors, scales = own_shares(CFG, FIRST)
    monkeypatch.setattr(publisher, "_receipt", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(tensors, scales, policy_version=10)
    with pytest.raises(EngineError, match="the trainer of policy version 10 has not said that it compared"):
        served.client.post("/resume")
    served.publish("ipc", FIRST, 11)
    publisher.close()
    assert generate(served.client) == answers[0]


def test_a_settled_sync_is_one_call_with_its_receipt(served):
    """Nothing of the layout is sent again, and a server that another trainer has published to meanwhile is prepared again."""
    first, second = served.publisher("ipc without buckets"), served.publisher("nccl")
    calls: list[str] = []
    post = first.client.post

    def counted(route, body=None, **options):
        calls.append(f"{route} {(body or {}).get('method', '')}")
        return post(route, body, **options)

    first.client.post = counted
    for version, weights in ((70, FIRST), (71, SECOND), (72, FIRST)):
        calls.clear()
        first.publish(exported(weights), policy_version=version)
        assert_live(served, weights)
    assert calls == ["/weight_update?pause=wait ", f"/resume?compared=72&channel={first.control._channel} "]
    second.publish(exported(SECOND), policy_version=73)
    calls.clear()
    first.publish(exported(FIRST), policy_version=74)
    assert calls[0] == "/weight_update?pause=wait "
    assert "/collective_rpc prepare_update" in calls
    assert served.versions() == [74]
    assert_live(served, FIRST)
    for publisher in (first, second):
        publisher.close()


def test_nobody_lets_generation_go_on_with_bytes_that_were_not_compared(served, monkeypatch):
    """Neither another trainer, whose own update finds itself unprepared, nor a bare ``/resume``; and an update begins with a pause."""
    first, second = served.publisher("ipc without buckets"), served.publisher("ipc")
    for version in (80, 81):
        first.publish(exported(FIRST), policy_version=version)
    monkeypatch.setattr(second._comparisons, "proof", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        second.publish(exported(SECOND), policy_version=82)
    for route in ("/resume", "/resume?compared=82", f"/resume?compared=82&channel={first.control._channel}"):
        with pytest.raises(EngineError, match=r"\(409\): Cannot resume: the trainer of policy version 82 has not said that it compared"):
            served.client.post(route)
        with pytest.raises(EngineError, match=r"\(503\): Generation refused"):
            generate(served.client)
    for route in ("/weight_update", "/weight_update?pause=", "/weight_update?pause=keep"):
        with pytest.raises(EngineError, match=r"\(409\): .*pause="):
            served.client.post(route, {"begin": True})
    first.publish(exported(FIRST), policy_version=83)
    assert_live(served, FIRST)
    generate(served.client)
    for publisher in (first, second):
        publisher.close()


def test_workers_methods_that_change_weights_unseen_are_refused(served):
    served.publish("ipc", FIRST, 14)
    before = generate(served.client)
    for method in ("refuse_generation", "weight_update", "_start_weight_update", "finish_weight_update", "reload_weights", "sleep"):
        with pytest.raises(EngineError, match=rf"\(409\): /collective_rpc takes methods .*, and '{method}' is none of these"):
            served.client.collective(method, "{}")
    assert served.versions() == [14]
    assert generate(served.client) == before


def test_a_place_outside_the_shared_memory_leaves_the_old_version_serving(served, monkeypatch):
    served.publish("ipc without buckets", FIRST, 15)
    before, export = generate(served.client), DirectSender._export

    def shifted(self, manifest, tensors):
        parameters = export(self, manifest, tensors)
        storage, start = parameters["places"][-1]
        return parameters | {"places": [*parameters["places"][:-1], (storage, start + (1 << 40))]}

    monkeypatch.setattr(DirectSender, "_export", shifted)
    with pytest.raises(EngineError, match=r"lies at bytes \d+ to \d+ of \d+ that the trainer shared; refused"):
        served.publish("ipc without buckets", SECOND, 16)
    assert served.versions() == [15]
    assert generate(served.client) == before
    assert_live(served, FIRST)


def test_routes_need_the_token(served):
    stranger = ServerClient(served.process.url, "x" * 43, timeout_s=10)
    assert stranger.is_healthy()
    for route in ("/inference/v1/generate", "/collective_rpc", "/start_weight_update", "/pause", "/no-such-route"):
        with pytest.raises(EngineError, match=f"refused the token for {route}"):
            stranger.post(route)
    with pytest.raises(EngineError, match="refused the token"):
        WeightPublisher(served.process.url, "", transport="ipc", device=torch.device("cpu"))
    with pytest.raises(EngineError, match="refused the token"):
        stranger.get("/v1/models")


@pytest.mark.parametrize("fault", ["missing", "recast", "reshaped", "unknown"])
def test_bad_update_is_refused_before_anything_is_written(served, fault):
    served.publish("ipc", FIRST, 20)
    before, name = generate(served.client), "model.layers.1.self_attn.k_proj.weight"
    weights = dict(SECOND)
    if fault == "missing":
        del weights[name]
    elif fault == "recast":
        weights[name] = weights[name].float()
    elif fault == "reshaped":
        weights[name] = weights[name][:-128]
    else:
        weights[f"{name}_scale"] = torch.ones(1)
    with pytest.raises(EngineError, match=f"nothing was written.*{name}"):
        served.publish("ipc", weights, 21)
    assert served.versions() == [20]
    assert generate(served.client) == before
    assert_live(served, FIRST)


def test_update_without_a_pause_is_refused(served):
    served.publish("ipc", FIRST, 30)
    with pytest.raises(EngineError, match=r"\(409\): Generation still runs"):
        served.client.post("/start_weight_update")
    with pytest.raises(EngineError, match=r"\(409\): pause=keep is neither wait nor abort"):
        served.client.update({}, pause="keep")
    with pytest.raises(EngineError, match=r"\(409\): mode=keep would finish requests under other weights"):
        served.client.post("/pause?mode=keep")
    generate(served.client)


def test_a_pause_refuses_instead_of_queueing_for_ever(served):
    served.publish("ipc", FIRST, 31)
    before = generate(served.client)
    served.client.post("/pause?mode=wait")
    with pytest.raises(EngineError, match=r"\(503\): Generation refused: generation is paused"):
        generate(served.client)
    served.client.post("/resume")
    assert generate(served.client) == before


def test_half_a_request_pauses_nothing(served):
    served.publish("ipc", FIRST, 32)
    before = generate(served.client)
    host, port = served.process.url.removeprefix("http://").split(":")
    lines = ["POST /weight_update?pause=wait HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {served.process.token}"]
    with socket.create_connection((host, int(port))) as trainer:
        trainer.sendall("\r\n".join([*lines, "Content-Length: 900", "", '{"layout": "']).encode())
        time.sleep(0.2)
    assert generate(served.client) == before
    assert served.client.post("/resume") == {"status": "resumed"}


@pytest.mark.parametrize(
    ("transport", "phase"), [*((transport, "halfway") for transport in (*TRANSPORTS, "ranks")), ("ipc", "open"), ("ipc", "receipt")]
)
def test_trainer_killed_leaves_the_old_version_or_a_refusal_until_the_retry(served, transport, phase):
    """The rest of the phases: test_torn_syncs.py."""
    check_trainer_killed(served, transport, phase, 40)


def test_an_update_is_over_before_what_the_engine_answers_next(served):
    """The front end stands still until the engine has answered both, and ``/resume`` follows the second on its connection at once."""
    served.publish("nccl", FIRST, 50)
    trainer = served.start_trainer("nccl", 12, 51)
    await_torn(served)
    host, port = served.process.url.removeprefix("http://").split(":")
    body = json.dumps({"method": "weight_state"})
    lines = [f"Host: {host}", f"Authorization: Bearer {served.process.token}", "Content-Type: application/json"]
    ask = ["POST /collective_rpc HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", body]
    resume = ["POST /resume HTTP/1.1", *lines, "Connection: close", "Content-Length: 2", "", "{}"]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(("\r\n".join(ask) + "\r\n".join(resume)).encode())
        # the engine has the question; too early a stop would only put off both
        time.sleep(0.5)
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            kill(served, trainer)
            time.sleep(2)
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        answers = connection.makefile().read()
    assert answers.count("the update to policy version 51 began and has not finished") == 2, answers
    assert "Cannot resume: the update" in answers
    served.publish("ipc", FIRST, 52)


@pytest.mark.parametrize(
    ("check", "transport"),
    [
        (armed_cases.check_several, "ipc without buckets"),
        (armed_cases.check_several, "nccl"),
        (armed_cases.check_cancelled, "ipc without buckets"),
        (armed_cases.check_another_publish, "ipc without buckets"),
        (armed_cases.check_patience, "nccl"),
        (armed_cases.check_requests_in_flight, "ipc without buckets"),
    ],
)
def test_announced_updates(served, check, transport):
    """The rest: test_armed_syncs.py."""
    check(served, transport, 100)


def test_a_trainer_that_fails_after_its_announcement(served, monkeypatch):
    armed_cases.check_failure(served, "ipc without buckets", 100, monkeypatch)


def test_a_trainer_killed_after_its_announcement_leaves_the_old_version_serving(served):
    armed_cases.check_killed_while_armed(served, "ipc", 100)


@pytest.mark.parametrize(
    ("check", "transport"),
    [
        (compared_cases.check_answers_wait, "ipc without buckets"),
        (compared_cases.check_answers_wait, "ipc"),
        (compared_cases.check_answers_wait, "nccl"),
        (compared_cases.check_difference, "nccl"),
        (compared_cases.check_difference, "disk"),
    ],
)
def test_bytes_are_compared_while_the_server_generates(served, check, transport, monkeypatch):
    check(served, transport, 200, monkeypatch)


def test_a_trainer_killed_while_it_compares_leaves_a_refusal(served):
    compared_cases.check_killed_while_comparing(served, "ipc", 200)


def test_announcing_is_refused_where_it_cannot_be(served, monkeypatch):
    """A transport of several calls, and a server on another host; a settled sync goes on without."""
    trainer = armed_cases.Trainer(served, "ipc", 100)
    assert not trainer.publisher.arm(100)
    assert "takes more than one call" in trainer.publisher.not_armed
    trainer.publisher.close()
    trainer = armed_cases.Trainer(served, "ipc without buckets", 100)
    monkeypatch.setattr(TrainerFlags, "describe", lambda flags: {"id": flags.id, "path": "/dev/shm/e2e_fp8_elsewhere", "ranks": 1})
    assert not trainer.publisher.arm(100)
    assert "cannot be opened" in trainer.publisher.not_armed
    monkeypatch.undo()
    assert not trainer.publish(100).armed
    armed_cases.check_armed(served, trainer, 101, 12)
    trainer.publisher.close()


def test_flipped_bit_fails_the_receipt_and_stops_generation(served, monkeypatch):
    """Also where the receipt comes sealed with the update, as it does from the second sync of a publisher on."""
    from e2e_fp8.sync import buckets

    pack, publisher = buckets.pack, served.publisher("ipc")
    publisher.publish(exported(FIRST), policy_version=59)

    def flipping_pack(bucket, tensors, buffer) -> None:
        pack(bucket, tensors, buffer)
        spec = next((s for s in bucket if s.name == "model.layers.1.mlp.experts.2.up_proj.weight"), None)
        if spec is not None:
            buffer[spec.offset + 777] ^= 1

    monkeypatch.setattr(buckets, "pack", flipping_pack)
    with pytest.raises(Exception, match=r"1 parts .* model.layers.1.mlp.experts.2.up_proj.weight \(bytes differ\)"):
        publisher.publish(exported(FIRST), policy_version=60)
    publisher.close()
    with pytest.raises(EngineError, match="the receipt of policy version 60 failed"):
        served.client.post("/resume")
    monkeypatch.undo()
    served.publish("ipc", FIRST, 60)
    assert_live(served, FIRST)


def test_server_killed_is_one_sentence(served):
    """Last in the file; test_torn_syncs.py starts another one."""
    kill_server(served, "ipc", "halfway", 12, 71)
