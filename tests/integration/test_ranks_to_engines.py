"""Trainers of several ranks into engines of one and two ranks: real servers, and plain tensors that are filled rank to rank.

Every byte of every engine rank is compared with a slow reference that gathers all trainer ranks, quantizes and cuts.
"""

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_cases import MODEL, Case, engine_reference, whole_weights
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, assert_live, case_config, generate

from e2e_fp8.config.root import Config
from e2e_fp8.sync.point_to_point import transfer_plan

WIDE = {"moe_intermediate_size": 256}
GRIDS = {
    "tp2": {"world": 2, "parallel": {"tensor": 2}},
    "ep2": {"world": 2, "parallel": {"expert": 2}},
    "pp2": {"world": 2, "parallel": {"pipeline": 2}},
    "tp2ep2": {"world": 4, "parallel": {"tensor": 2, "expert": 2}},
}
MAX_BYTES = 40 << 10
MESSAGE_BYTES = 256 << 10


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Tensor-parallel size -> a real vLLM server."""
    model = {name: value for name, value in (MODEL | WIDE).items() if name not in ("architecture", "initializer_range")}

    def start(size: int) -> Served:
        return Served(case_config(tensor_parallel=size, **model), tmp_path_factory.mktemp(f"tp{size}"))

    # a server ends with the thread that started it, so the pool stays
    with ThreadPoolExecutor(2) as pool:
        started = dict(zip((1, 2), pool.map(start, (1, 2)), strict=True))
        yield started
        for served in started.values():
            served.process.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", range(1, 5), ids=list(GRIDS))
def test_servers_hold_the_bytes_of_every_trainer_grid(version, servers, results):
    to = [
        {"url": one.process.url, "token_file": str(one.process.log.parent / "server.token"), "policy_version": version}
        for one in servers.values()
    ]
    case = Case(**list(GRIDS.values())[version - 1], model=WIDE, steps=1, rollout_tp=2, more={"publish": to})
    weights = whole_weights(case, results(case))
    for size, served in servers.items():
        assert served.versions() == [version] * size
        for rank in range(size):
            assert_live(served, weights, rank=rank, size=size)
            live = served.live_bytes(rank)
            for name, tensor in engine_reference(case, weights, rank, size).items():
                if tensor.dim() == 1 or name.endswith("embed_tokens.weight"):
                    assert same_bytes(live[name], tensor), (size, rank, name)
        assert len(generate(served.client)) == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("grid", GRIDS)
def test_trainer_ranks_send_their_rows_into_servers(grid, servers, results):
    """The second update goes over the channel of the first. No rank of the trainer makes a tensor of the size of a whole one."""
    first = 10 * (1 + list(GRIDS).index(grid))
    to = [
        {"url": one.process.url, "token_file": str(one.process.log.parent / "server.token"), "size": size, "versions": [first, first + 1]}
        for size, one in servers.items()
    ]
    case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, more={"publish_ranks": to})
    folder = results(case)
    weights = whole_weights(case, folder)
    for size, served in servers.items():
        assert served.versions() == [first + 1] * size
        for rank in range(size):
            assert_live(served, weights, rank=rank, size=size)
            live = served.live_bytes(rank)
            for name, tensor in engine_reference(case, weights, rank, size).items():
                if tensor.dim() == 1 or name.endswith("embed_tokens.weight"):
                    assert same_bytes(live[name], tensor), (size, rank, name)
        reports = [json.loads((folder / f"published-{size}-{rank}.json").read_text()) for rank in range(case.world)]
        plan = transfer_plan(rollout_of(case, size), case.world, "local")
        assert all(one["bytes"] == plan.totals()["bytes"] for one in reports)
        assert len({one["digest"] for one in reports}) == 1
        assert max(one["largest_allocation"] for one in reports) <= MESSAGE_BYTES
        by_ranks = generate(served.client)
        served.publish("ipc", weights, first + 2)
        # what vLLM repacks was delivered too: the same weights as whole tensors give the same tokens
        assert generate(served.client) == by_ranks


def rollout_of(case: Case, size: int) -> Config:
    cfg = Config.model_validate(case.config)
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"tensor_parallel": size})})


@pytest.mark.parametrize("grid", GRIDS)
def test_each_rank_sends_its_rectangles_straight_to_the_engine_ranks(grid, results):
    case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, more={"engines": 2, "max_bytes": MAX_BYTES})
    check_transfer(case, results(case))


def check_transfer(case: Case, folder: Path) -> None:
    """Every byte of both engine ranks, and what the transfer took."""
    weights = whole_weights(case, folder)
    for rank in range(2):
        found, expected = load_file(folder / f"engine-{rank}.safetensors"), engine_reference(case, weights, rank, 2)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert same_bytes(found[name], tensor), (rank, name)
    reports = [json.loads((folder / f"transfer-{rank}.json").read_text()) for rank in range(case.world + 2)]
    totals = transfer_plan(Config.model_validate(case.config), case.world, "te" if case.backend == "cuda" else "local").totals()
    assert sum(one["num_bytes"] for one in reports[: case.world]) == totals["bytes"]
    assert sum(one["num_bytes"] for one in reports[: case.world]) == sum(one["num_bytes"] for one in reports[case.world :])
    largest_tensor = max(tensor.nbytes for tensor in found.values())
    # of several ranks with the same weights some may have nothing to send
    assert sum(one["messages"] > 1 for one in reports[: case.world]) > 1
    assert all(one["messages"] > 1 for one in reports[case.world :])
    for one in reports:
        assert one["buffer_bytes"] <= 2 * MAX_BYTES
        assert one["largest_allocation"] <= MAX_BYTES < largest_tensor


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"max_bytes": 4096}, "Messages of 4096 bytes do not hold 128 rows of"),
        ({"engine_version": 5}, "ranks disagree about the weight transfer, nothing was written"),
    ],
    ids=["messages", "version"],
)
def test_a_transfer_that_cannot_be_is_refused_on_every_rank(more, part, run_job):
    case = Case(**GRIDS["tp2"], model=WIDE, steps=0, rollout_tp=2, more={"engines": 2, "max_bytes": MAX_BYTES} | more)
    statuses, out = run_job(case)
    assert statuses == [2] * 4
    for rank in range(4):
        assert part in (out / f"refused-{rank}").read_text()


@pytest.mark.parametrize("victim", [1, 3], ids=["trainer", "engine"])
def test_a_rank_killed_half_way_is_one_sentence_on_every_other(victim, run_job):
    more = {"engines": 2, "max_bytes": MAX_BYTES, "victim": victim}
    statuses, out = run_job(Case(**GRIDS["tp2"], model=WIDE, steps=0, rollout_tp=2, more=more))
    others = [rank for rank in range(4) if rank != victim]
    assert statuses == [2 if rank in others else -signal.SIGKILL for rank in range(4)], [f.read_text() for f in out.glob("failed-*")]
    for rank in others:
        assert "of the weight transfer died or hangs; the weights are incomplete" in (out / f"refused-{rank}").read_text()
