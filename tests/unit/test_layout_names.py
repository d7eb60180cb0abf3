"""Names, shapes and dtypes of both sides against the real model classes: Megatron-Core's GPTModel and vLLM's."""

from pathlib import Path

import pytest
import torch
from layout_models import run_ranks, tiny_configs
from safetensors.torch import load_file, save_file

from e2e_fp8.layout import EngineParallel, MegatronParallel, engine_shards, hf_tensors, megatron_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.tiles import scale_shape
from e2e_fp8.megatron_names import hf_sources
from e2e_fp8.rollout.engine_layout import rank_slots

_KV_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""vLLM's own placeholders beside the attention; deleted once a model is loaded."""
TRAINER = {
    f"{family} {name}": {"config": config, "spec": "local"} | sizes
    for name, layers, sizes in (
        ("tp2", 2, {"tensor": 2, "pipeline": 1, "expert": 1, "expert_tensor": 2}),
        ("pp2", 2, {"tensor": 1, "pipeline": 2, "expert": 1, "expert_tensor": 1}),
        ("pp2-vpp2", 4, {"tensor": 1, "pipeline": 2, "virtual_pipeline": 2, "expert": 1, "expert_tensor": 1}),
        ("tp2-ep2", 2, {"tensor": 2, "pipeline": 1, "expert": 2, "expert_tensor": 1}),
        ("tp2-etp1", 2, {"tensor": 2, "pipeline": 1, "expert": 1, "expert_tensor": 1}),
        ("etp2", 2, {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 2}),
    )
    for family, config in tiny_configs(layers).items()
    if name in ("tp2", "pp2", "pp2-vpp2") or "moe_intermediate_size" in config
}
ENGINE_SIZES = {
    1: {"tp1": {"tensor": 1, "data": 1, "expert": False}},
    2: {"tp2": {"tensor": 2, "data": 1, "expert": False}, "tp2-ep": {"tensor": 2, "data": 1, "expert": True}},
}


def engine_cases(world_size: int, folder: Path) -> dict[str, dict]:
    """``folder`` has a checkpoint of each family."""
    return {
        f"{family} {name}": {"config": config, "checkpoint": str(folder / f"{family}.safetensors")} | sizes
        for name, sizes in ENGINE_SIZES[world_size].items()
        for family, config in tiny_configs().items()
        if not sizes["expert"] or "moe_intermediate_size" in config
    }


@pytest.fixture(scope="module")
def trainer_ranks(tmp_path_factory):
    return run_ranks("trainer_parameters_process.py", 2, TRAINER, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_parameters_are_those_of_megatrons_model(trainer_ranks, name):
    case = TRAINER[name]
    sizes = {key: value for key, value in case.items() if key not in ("config", "spec")}
    parallel = MegatronParallel(**sizes, data=2 // (sizes["tensor"] * sizes["pipeline"]))
    for rank in range(2):
        shards = megatron_shards(case["config"], parallel, rank, spec="local")
        for chunk, real in enumerate(trainer_ranks[rank][name]):
            assert {p.name: list(p.shape) for p in shards if p.chunk == chunk} == real


def random_checkpoint(config: dict) -> dict[str, torch.Tensor]:
    """Random bytes under every Hugging Face name of the model, those of block scales included."""
    found = {}
    for tensor in hf_tensors(config):
        forms = [(tensor.name, tensor.shape, getattr(torch, tensor.dtype))]
        if tensor.fp8:
            forms.append((scale_name(tensor.name), scale_shape(*tensor.shape), torch.float32))
        for name, shape, dtype in forms:
            found[name] = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, config in tiny_configs().items():
        save_file(random_checkpoint(config), folder / f"{family}.safetensors")
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def engine_ranks(request, tmp_path_factory, checkpoints):
    cases = engine_cases(request.param, checkpoints)
    return cases, run_ranks("engine_parameters_process.py", request.param, cases, tmp_path_factory.mktemp("engine"))


def rank_cases(engine_ranks):
    """(what it is, case, parallel sizes, rank, vLLM's parameters) of every rank of every case."""
    cases, ranks = engine_ranks
    for name, case in cases.items():
        parallel = EngineParallel(tensor=case["tensor"], data=case["data"], expert=case["expert"])
        for rank, files in enumerate(ranks):
            real = {n: value for n, value in load_file(files[name]).items() if n.rsplit(".", 1)[1] not in _KV_CACHE_SCALES}
            yield (name, rank), case, parallel, rank, real


def test_engine_parameters_are_those_of_vllms_model(engine_ranks):
    for what, case, parallel, rank, real in rank_cases(engine_ranks):
        expected = {}
        for parameter in engine_shards(case["config"], parallel, rank):
            expected[parameter.name] = (parameter.shape, getattr(torch, parameter.dtype))
            if parameter.fp8:
                expected[scale_name(parameter.name)] = (parameter.scale_shape, torch.float32)
        assert expected == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in real.items()}, what


def test_every_tensor_of_a_checkpoint_lies_where_vllms_own_loader_puts_it(engine_ranks):
    """Hugging Face names, their places in fused matrices and in stacks of experts, and the same for block scales."""
    for what, case, parallel, rank, real in rank_cases(engine_ranks):
        given, seen = load_file(case["checkpoint"]), set()
        rest = {name: torch.ones(tensor.shape, dtype=torch.bool) for name, tensor in real.items()}
        for start, slot in rank_slots(case["config"], parallel, rank):
            area = tuple(slice(first, first + size) for first, size in zip(start, slot.shape, strict=True))
            found, wanted = slot.view(real).contiguous(), given[slot.name][area].contiguous()
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (what, slot.name)
            seen.add(slot.name)
            place = rest[slot.parameter] if slot.expert is None else rest[slot.parameter][slot.expert]
            place[slot.row : slot.row + slot.shape[0]] = False
        assert parallel.expert or seen == given.keys(), what
        # what no tensor of the checkpoint fills are the rows that pad the vocabulary: zeros
        unfilled = {name: real[name][mask] for name, mask in rest.items() if mask.any()}
        assert unfilled.keys() <= {"model.embed_tokens.weight", "lm_head.weight"}, what
        assert not any(values.view(torch.uint8).any() for values in unfilled.values()), what


@pytest.mark.parametrize("spec", ["te", "te_norms", "local"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_names_agree_with_the_table_that_ran_on_a_gpu(family, spec):
    config = tiny_configs()[family]
    for parameter in megatron_shards(config, MegatronParallel(), 0, spec=spec):
        assert hf_sources(parameter.name) == list(dict.fromkeys(part.hf_name for part in parameter.parts))
