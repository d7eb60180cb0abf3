"""Router replay in trainers of several real processes: every rank's routers take its own tokens' experts."""

import json

import pytest
import torch
from rank_cases import Case, held, model_of
from rank_process import batches_of
from references import sharding_reference
from tolerances import RANKS_LOG_PROBS

from e2e_fp8.config.root import Config

CASES = {
    "tp2": Case(world=2, parallel={"tensor": 2}, more={"replay": "R3_weights_order"}),
    "ep2": Case(world=2, parallel={"expert": 2}, more={"replay": "R3_weights_order"}),
    "pp2": Case(world=2, parallel={"pipeline": 2}, more={"replay": "R3"}),
    "cp2": Case(world=2, parallel={"context": 2}, more={"replay": "R3_weights_order"}),
    "dp2": Case(world=2, more={"replay": "R3"}),
}


def ranks(case: Case, folder):
    """Of each rank: its place, what it holds, and its micro-batches with the routing that they ask for."""
    batches = batches_of(json.loads((folder / "case.json").read_text()), Config.model_validate(case.config))
    places = sharding_reference.coordinates(case.world, case.parallel)
    data = max(place["data"] for place in places) + 1
    for place, found in zip(places, held(folder, case.world, "end"), strict=True):
        yield place, found, batches[place["data"] :: data]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_replays_the_routing_of_its_own_tokens(name, results):
    case = CASES[name]
    layers = model_of(case)["num_hidden_layers"]
    # sizes of 2 at most: one of them divides the tokens
    divided = "context" if "context" in case.parallel else "tensor"
    shares = case.parallel.get(divided, 1)
    for place, found, mine in ranks(case, results(case)):
        stage = place.get("pipeline", 0)
        local = range(layers) if case.parallel.get("pipeline", 1) == 1 else [stage]
        for index, batch in enumerate(mine):
            for layer in local:
                ids, mask = batch.routed_experts[:, layer].long(), batch.replay_mask[:, layer]
                wanted = torch.zeros(len(ids), 4, dtype=torch.uint8).scatter(1, ids, 1)
                padding = -len(ids) % shares
                part = [t.chunk(shares)[place[divided]] for t in (pad(wanted, padding), pad(mask, padding))]
                got = found[f"routing/{index}/{layer}"]
                assert got.shape == part[0].shape
                assert torch.equal(got[part[1]], part[0][part[1]]), (place, index, layer)
                assert bool((got.sum(dim=1) == 2).all())
                if batch.routed_weights is not None:
                    given = torch.zeros(len(ids), 4).scatter(1, ids, batch.routed_weights[:, layer])
                    given = pad(given, padding).chunk(shares)[place[divided]]
                    assert torch.equal(found[f"weights/{index}/{layer}"][part[1]], given[part[1]])


def pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(rows, *values.shape[1:])])


@pytest.mark.parametrize("name", CASES)
def test_log_probs_with_replay_are_those_of_one_rank(name, results):
    case = CASES[name]
    alone = held(results(case.alone()), 1, "end")[0]
    for place, found, mine in ranks(case, results(case)):
        for index in range(len(mine)):
            expected = alone[f"log_probs/{index + place['data'] if len(mine) == 1 else index}"]
            got = found[f"log_probs/{index}"]
            if case.parallel.get("tensor") or case.parallel.get("context"):
                # partial sums of tensor ranks round once more; attention to a part of the queries is another kernel
                assert (got - expected).abs().mean() <= RANKS_LOG_PROBS["fp8"]
            else:
                assert torch.equal(got, expected), (place, index)
