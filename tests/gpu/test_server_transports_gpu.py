"""All transports into a vLLM server on Hopper GPUs: bytes stay, CUDA graphs see them, twenty updates in a row."""

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration import armed_cases, compared_cases
from integration.gpus import ENGINE, places
from integration.server_cases import Served, assert_live, case_config, exported, generate, random_weights, shares_publisher
from integration.test_server_users import teach_and_serve

from e2e_fp8.errors import ByteMismatchError, ConfigError, EngineError
from e2e_fp8.rollout.agreement import check_agreement
from e2e_fp8.sync.direct import DirectSender
from e2e_fp8.sync.engine_receipt import RankReceipts
from e2e_fp8.sync.publish_report import PublishReport
from e2e_fp8.sync.publisher import WeightPublisher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def on_gpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in weights.items()}


def show(transport: str, report: PublishReport) -> None:
    phases = ", ".join(f"{phase} {seconds * 1e3:.2f}" for phase, seconds in report.phases.items())
    print(f"{transport} {report.num_bytes} bytes: sync {report.seconds:.4f} s, receipt {report.receipt_seconds:.4f} s; in ms: {phases}")


def routes_of(publisher: WeightPublisher) -> list[str]:
    """The routes that the publisher posts to from now on, as they are posted to."""
    routes: list[str] = []
    post = publisher.client.post

    def counted(route, body=None, **options):
        routes.append(route)
        return post(route, body, **options)

    publisher.client.post = counted  # type: ignore[method-assign]
    return routes


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def served(request, tmp_path_factory):
    cfg = case_config(request.param, device="cuda")
    served = Served(cfg, tmp_path_factory.mktemp("served"), enforce_eager=False)
    yield served
    served.process.close()


@pytest.mark.parametrize("transport", ["ipc", "ipc with buckets", "disk"])
def test_delivered_bytes_are_live_and_generation_follows(served, transport):
    publisher, answers = served.publisher(transport), []
    check_agreement(served.cfg, publisher.workers)
    assert all(worker["in_place"] for worker in publisher.workers)
    weights = {seed: random_weights(served.cfg, seed) for seed in (11, 12)}
    for version, seed in ((1, 11), (2, 12), (3, 11)):
        report = publisher.publish(exported(on_gpu(weights[seed])), policy_version=version)
        assert report.receipt is not None
        assert_live(served, weights[seed])
        answers.append(generate(served.client))
        show(transport, report)
    assert answers[0] == answers[2] != answers[1]
    publisher.close()


def test_twenty_updates_in_a_row(served):
    publisher = served.publisher("ipc")
    for version in range(20):
        weights = random_weights(served.cfg, 100 + version)
        publisher.publish(exported(on_gpu(weights)), policy_version=version)
        generate(served.client)
    assert_live(served, weights)
    publisher.close()


def test_trainers_memory_is_read_as_it_is_now_without_another_export(served):
    """One allocation, weights changed in place: after the first update no channel is opened again."""
    weights = on_gpu(random_weights(served.cfg, 40))
    publisher = served.publisher("ipc")
    publisher.publish(exported(weights), policy_version=40)
    routes = routes_of(publisher)
    for version in range(41, 45):
        for name, tensor in random_weights(served.cfg, version).items():
            weights[name].copy_(tensor)
        routes.clear()
        show("ipc in place", publisher.publish(exported(weights), policy_version=version))
        assert routes == ["/weight_update?pause=wait", f"/resume?compared={version}&channel={publisher.control._channel}"]
        assert_live(served, random_weights(served.cfg, version))
    publisher.close()


def test_views_with_gaps_and_tensors_that_move_are_staged(served):
    """Scales padded as Transformer Engine pads them, in one storage; weights at a new address in each update."""
    publisher, alive = served.publisher("ipc"), []
    routes = routes_of(publisher)
    for version in range(50, 54):
        plain = random_weights(served.cfg, version)
        weights = {}
        for name, tensor in on_gpu(plain).items():
            if name.endswith("_scale_inv"):
                padded = torch.full((tensor.shape[0], tensor.shape[1] + 3), 7.0, device="cuda")
                padded[:, : tensor.shape[1]] = tensor
                tensor = padded[:, : tensor.shape[1]]
            weights[name] = tensor
        alive.append(weights)
        routes.clear()
        publisher.publish(exported(weights), policy_version=version)
        assert_live(served, plain)
    assert "/init_weight_transfer_engine" not in routes
    publisher.close()


def test_a_place_outside_the_exported_memory_is_refused_by_the_worker(served, monkeypatch):
    """Nothing is read and nothing written, the old version serves on, and the next update passes."""
    export = DirectSender._export

    def shifted(self, manifest, tensors):
        parameters = export(self, manifest, tensors)
        storage, start = parameters["places"][-1]
        parameters["places"][-1] = (storage, start + (1 << 40))
        return parameters

    weights = random_weights(served.cfg, 60)
    before = served.versions()
    monkeypatch.setattr(DirectSender, "_export", shifted)
    with pytest.raises(EngineError, match=r"lies at bytes \d+ to \d+ of \d+ that the trainer shared"):
        served.publish("ipc", on_gpu(weights), 60)
    assert served.versions() == before
    monkeypatch.undo()
    served.publish("ipc", on_gpu(weights), 60)
    assert_live(served, weights)


def test_a_byte_that_changes_on_the_way_fails_the_sealed_receipt(served, monkeypatch):
    """The trainer reads its own bytes before the engine does; a change between is named, and generation stays refused."""
    weights = on_gpu(random_weights(served.cfg, 70))
    publisher, name = served.publisher("ipc"), "model.layers.1.self_attn.o_proj.weight"
    publisher.publish(exported(weights), policy_version=70)
    announce, start, is_read = publisher.control.announce, RankReceipts.start, threading.Event()

    def read(*args, **options):
        digests = start(*args, **options)()
        is_read.set()
        return lambda: digests

    def changed_first(*args, **options):
        assert is_read.wait(30)
        weights[name].view(torch.uint8)[3, 5] ^= 1
        torch.cuda.synchronize()
        told = announce(*args, **options)
        weights[name].view(torch.uint8)[3, 5] ^= 1
        torch.cuda.synchronize()
        return told

    monkeypatch.setattr(RankReceipts, "start", read)
    monkeypatch.setattr(publisher.control, "announce", changed_first)
    with pytest.raises(ByteMismatchError, match=rf"1 parts .* {name} \(bytes differ\)"):
        publisher.publish(exported(weights), policy_version=71)
    with pytest.raises(EngineError, match="the receipt of policy version 71 failed"):
        served.client.post("/resume")
    monkeypatch.undo()
    publisher.publish(exported(weights), policy_version=72)
    assert_live(served, {key: tensor.cpu() for key, tensor in weights.items()})
    publisher.close()


@pytest.mark.parametrize("check", armed_cases.CHECKS)
def test_announced_updates(served, check):
    check(served, "ipc", 1000)


def test_a_trainer_fails_after_its_announcement(served, monkeypatch):
    armed_cases.check_failure(served, "ipc", 1000, monkeypatch)


@pytest.mark.parametrize("check", [armed_cases.check_killed_while_armed, armed_cases.check_killed_after_its_word])
def test_a_trainer_killed_after_its_announcement(served, check):
    if not served.cfg.model.is_moe:
        pytest.skip("the trainer of armed_process.py has the mixture of experts")
    check(served, "ipc", 1000)


@pytest.mark.parametrize("check", [compared_cases.check_answers_wait, compared_cases.check_difference])
@pytest.mark.parametrize("transport", ["ipc", "ipc with buckets"])
def test_bytes_are_compared_while_the_server_generates(served, check, transport, monkeypatch):
    check(served, transport, 2000, monkeypatch)


def test_a_trainer_killed_while_it_compares(served):
    if not served.cfg.model.is_moe:
        pytest.skip("the trainer of armed_process.py has the mixture of experts")
    compared_cases.check_killed_while_comparing(served, "ipc", 2000)


def test_nccl_on_the_engines_own_gpu_is_refused(served):
    with pytest.raises(ConfigError, match=r"share GPU .* use transport ipc"):
        served.publisher("nccl")
    with pytest.raises(ConfigError, match=r"Trainer rank 0 and rollout rank 0 share GPU .* set rollout.server_devices"):
        shares_publisher(served.process.url, served.process.token, served.cfg, torch.device("cuda:0"))


def test_foreign_transformer_engine_loop_is_served(tmp_path):
    teach_and_serve(tmp_path, "cuda")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3"])
def test_nccl_between_two_processes(tmp_path, architecture, monkeypatch):
    """Each on a GPU of its own where there are two."""
    cfg = case_config(architecture, device="cuda")
    served = Served(cfg, tmp_path, environ=places(2)[ENGINE].server_environ, enforce_eager=False)
    try:
        publisher = served.publisher("nccl")
        routes = routes_of(publisher)
        for version in range(1, 6):
            weights = random_weights(cfg, 20 + version)
            routes.clear()
            report = publisher.publish(exported(on_gpu(weights)), policy_version=version)
            assert report.receipt is not None
            assert version == 1 or routes == [
                "/weight_update?pause=wait",
                f"/resume?compared={version}&channel={publisher.control._channel}",
            ]
            assert_live(served, weights)
            show("nccl", report)
            generate(served.client)
        publisher.close()
        for check in armed_cases.CHECKS:
            check(served, "nccl", 1000)
        for check in (compared_cases.check_answers_wait, compared_cases.check_difference):
            check(served, "nccl", 2000, monkeypatch)
    finally:
        served.process.close()


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_two_rollout_ranks_hold_their_parts(tmp_path, transport):
    """The trainer on GPU 0; ipc reads its buffers from peer GPUs, which therefore have to be visible to the server."""
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 4, "moe_intermediate_size": 256}
    cfg = case_config("qwen3_moe", device="cuda", tensor_parallel=2, **sizes)
    served = Served(cfg, tmp_path, environ={"CUDA_VISIBLE_DEVICES": "1,2" if transport == "nccl" else "1,2,0"})
    try:
        for version in (1, 2):
            weights = random_weights(cfg, 30 + version)
            served.publish(transport, on_gpu(weights), version)
            for rank in range(2):
                assert_live(served, weights, rank=rank, size=2)
        generate(served.client)
    finally:
        served.process.close()
