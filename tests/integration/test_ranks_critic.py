"""A critic beside a trainer of several real processes: what every rank says of its values is what one rank says."""

import json

import pytest
import torch
from rank_cases import Case
from references import sharding_reference
from safetensors.torch import load_file
from tolerances import RANKS_UPDATE

MORE = {"critic": True}
CASES = {
    "dp2": Case(world=2, steps=0, more=MORE),
    "pp2": Case(world=2, parallel={"pipeline": 2}, steps=0, more=MORE),
    # experts under tensor parallelism bring sequence parallelism: the head sees half of the tokens on each rank
    "bf16_tp2": Case(world=2, parallel={"tensor": 2}, precision="bf16", steps=0, more=MORE),
    "bf16_dense_tp2": Case(world=2, parallel={"tensor": 2}, precision="bf16", model={"architecture": "qwen3"}, steps=0, more=MORE),
}


def alone(case: Case) -> Case:
    return Case(world=1, precision=case.precision, model=case.model, steps=0, more=MORE)


@pytest.mark.parametrize("name", ["dp2", "pp2", "bf16_tp2", pytest.param("bf16_dense_tp2", marks=pytest.mark.slow)])
def test_values_head_and_reports_are_those_of_one_rank(name, results):
    case = CASES[name]
    folder, single = results(case), results(alone(case))
    expected, losses = load_file(single / "critic-0.safetensors"), json.loads((single / "critic-0.json").read_text())
    exact = "tp" not in name
    limit = RANKS_UPDATE[case.precision]
    assert losses[1]["critic/vf_loss"] < losses[0]["critic/vf_loss"]
    for rank, place in enumerate(sharding_reference.coordinates(case.world, case.parallel)):
        found = load_file(folder / f"critic-{rank}.safetensors")
        for ours, theirs in zip(json.loads((folder / f"critic-{rank}.json").read_text()), losses, strict=True):
            # sums over micro-batches have another order on other ranks
            assert ours["critic/vf_loss"] == pytest.approx(theirs["critic/vf_loss"], rel=1e-6 if exact else limit)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5 if exact else limit)
        if "master/output_layer.weight" in found:
            compare(found["master/output_layer.weight"], expected["master/output_layer.weight"], exact, limit)
        batches = [place["data"]] if name == "dp2" else [0, 1]
        for index, batch in enumerate(batches):
            compare(found[f"values/{index}"], expected[f"values/{batch}"], exact, limit)


def compare(found: torch.Tensor, expected: torch.Tensor, exact: bool, limit: float) -> None:
    """Equal bits, or a distance relative to the length: both started from zero."""
    assert expected.norm() > 0
    if exact:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).norm() <= limit * expected.norm()
