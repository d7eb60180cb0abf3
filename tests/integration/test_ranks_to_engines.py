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
from rank_cases import MODEL, Case, engine_reference, native_reference, whole_weights
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.server_cases import Served, assert_live, case_config, generate, random_weights

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


SERVERS = {"tp1": (1, False), "tp2": (2, False), "tp2ep": (2, True)}
"""Name -> tensor-parallel size, and whether whole experts are dealt out."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A real vLLM server for each of SERVERS."""
    model = {name: value for name, value in (MODEL | WIDE).items() if name not in ("architecture", "initializer_range")}

    def start(name: str) -> Served:
        size, expert = SERVERS[name]
        return Served(case_config(tensor_parallel=size, expert_parallel=expert, **model), tmp_path_factory.mktemp(name))

    # a server ends with the thread that started it, so the pool stays
    with ThreadPoolExecutor(len(SERVERS)) as pool:
        started = dict(zip(SERVERS, pool.map(start, SERVERS), strict=True))
        yield started
        for served in started.values():
            served.process.close()


def address(served: Served) -> dict[str, str]:
    return {"url": served.process.url, "token_file": str(served.process.log.parent / "server.token")}


def check_server(name: str, served: Served, case: Case, weights: dict[str, torch.Tensor], version: int) -> None:
    """Every byte that vLLM keeps as it came, at every rank of one server."""
    size, expert = SERVERS[name]
    assert served.versions() == [version] * size
    for rank in range(size):
        assert_live(served, weights, rank=rank, size=size, expert=expert)
        live = served.live_bytes(rank)
        for parameter, tensor in engine_reference(case, weights, rank, size, expert=expert).items():
            if tensor.dim() == 1 or parameter.endswith("embed_tokens.weight"):
                assert same_bytes(live[parameter], tensor), (name, rank, parameter)


def first_log_probs(served: Served) -> torch.Tensor:
    """Of the most likely token after each of 32 prompts."""
    found = []
    for first in range(32):
        params = {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "detokenize": False}
        answer = served.client.post("/inference/v1/generate", {"token_ids": [2, first, 7, 5 + first], "sampling_params": params})
        found.append(answer["choices"][0]["logprobs"]["content"][0]["logprob"])
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", range(1, 5), ids=list(GRIDS))
def test_servers_hold_the_bytes_of_every_trainer_grid(version, servers, results):
    to = [address(one) | {"policy_version": version} for one in servers.values()]
    case = Case(**list(GRIDS.values())[version - 1], model=WIDE, steps=1, rollout_tp=2, more={"publish": to})
    weights = whole_weights(case, results(case))
    for name, served in servers.items():
        check_server(name, served, case, weights, version)
        assert len(generate(served.client)) == 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("grid", GRIDS)
def test_trainer_ranks_send_their_rows_into_servers(grid, servers, results):
    """The second update goes over the channel of the first. No rank of the trainer makes a tensor of the size of a whole one."""
    first = 10 * (1 + list(GRIDS).index(grid))
    rollout = {name: {"tensor_parallel": size, "expert_parallel": expert} for name, (size, expert) in SERVERS.items()}
    to = [address(one) | {"name": name, "rollout": rollout[name], "versions": [first, first + 1]} for name, one in servers.items()]
    case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, more={"publish_ranks": to})
    folder = results(case)
    weights = whole_weights(case, folder)
    for name, served in servers.items():
        check_server(name, served, case, weights, first + 1)
        reports = [json.loads((folder / f"published-{name}-{rank}.json").read_text()) for rank in range(case.world)]
        cfg = Config.model_validate(case.config)
        cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=rollout[name])})
        assert all(one["bytes"] == transfer_plan(cfg, case.world, "local").totals()["bytes"] for one in reports)
        assert len({one["digest"] for one in reports}) == 1
        assert max(one["largest_allocation"] for one in reports) <= MESSAGE_BYTES
        by_ranks = generate(served.client)
        served.publish("ipc", weights, first + 2)
        # what vLLM repacks was delivered too: the same weights as whole tensors give the same tokens
        assert generate(served.client) == by_ranks


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_expert_parallel_servers_have_the_log_probs_of_one_rank(servers):
    for name, served in servers.items():
        served.publish("ipc", random_weights(served.cfg, 17), 90)
        assert served.versions() == [90] * SERVERS[name][0]
    alone, split, dealt = (first_log_probs(servers[name]) for name in SERVERS)
    # each rank rounds its part of a sum to BF16, which moves single E4M3 codes behind it: a bound on the mean, none on the maximum
    assert (dealt - alone).abs().mean() < 0.08
    assert (split - alone).abs().mean() < 0.08


@pytest.mark.parametrize("grid", GRIDS)
def test_each_rank_sends_its_rectangles_straight_to_the_engine_ranks(grid, results):
    case = Case(**GRIDS[grid], model=WIDE, steps=1, rollout_tp=2, more={"engines": 2, "max_bytes": MAX_BYTES})
    check_transfer(case, results(case))


def test_rows_pass_where_no_checkpoint_could_hold_the_tiles(results):
    """K and V of a 64-wide head share a row of scales at each rank of both sides, which are quantized as one fused matrix."""
    narrow = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"engines": 2, "max_bytes": MAX_BYTES, "gather": False}
    case = Case(**GRIDS["tp2"], model=WIDE | narrow, steps=1, rollout_tp=2, transport="ranks", more=more)
    folder = results(case)
    for rank in range(2):
        found, expected = load_file(folder / f"engine-{rank}.safetensors"), native_reference(case, folder, rank, 2)
        assert expected["model.layers.0.self_attn.qkv_proj.weight_scale_inv"].shape[0] == 2
        for name, tensor in expected.items():
            assert same_bytes(found[name], tensor), (rank, name)


def check_transfer(case: Case, folder: Path, *, engines: int = 2) -> None:
    """Every byte of all engine ranks, and what the transfer took."""
    weights = whole_weights(case, folder)
    for rank in range(engines):
        found, expected = load_file(folder / f"engine-{rank}.safetensors"), engine_reference(case, weights, rank, engines)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert same_bytes(found[name], tensor), (rank, name)
    reports = [json.loads((folder / f"transfer-{rank}.json").read_text()) for rank in range(case.world + engines)]
    totals = transfer_plan(Config.model_validate(case.config), case.world, "te" if case.backend == "cuda" else "local").totals()
    assert sum(one["num_bytes"] for one in reports[: case.world]) == totals["bytes"]
    assert sum(one["num_bytes"] for one in reports[: case.world]) == sum(one["num_bytes"] for one in reports[case.world :])
    largest_tensor = max(tensor.nbytes for tensor in found.values())
    # of several ranks with the same weights some may have nothing to send
    assert sum(one["messages"] > 1 for one in reports[: case.world]) >= min(2, case.world)
    assert all(one["messages"] > 1 for one in reports[case.world :])
    for one in reports:
        assert one["buffer_bytes"] <= 2 * case.more["max_bytes"]
        assert one["largest_allocation"] <= case.more["max_bytes"] < largest_tensor


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
