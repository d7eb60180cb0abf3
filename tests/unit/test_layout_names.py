"""Names, shapes and dtypes of both sides against the real model classes: Megatron-Core's GPTModel and vLLM's."""

import pytest
from layout_models import run_ranks, tiny_configs

from e2e_fp8.layout import EngineParallel, MegatronParallel, engine_shards, megatron_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.megatron_names import hf_sources

_KV_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
"""vLLM's own placeholders beside the attention; deleted once a model is loaded."""
TRAINER = {
    f"{family} {name}": {"config": config, "spec": "local"} | sizes
    for name, layers, sizes in (
        ("tp2", 2, {"tensor": 2, "pipeline": 1, "expert": 1, "expert_tensor": 2}),
        ("pp2", 2, {"tensor": 1, "pipeline": 2, "expert": 1, "expert_tensor": 1}),
        ("pp2-vpp2", 4, {"tensor": 1, "pipeline": 2, "virtual_pipeline": 2, "expert": 1, "expert_tensor": 1}),
        ("tp2-ep2", 2, {"tensor": 2, "pipeline": 1, "expert": 2, "expert_tensor": 1}),
    )
    for family, config in tiny_configs(layers).items()
    if sizes["expert"] == 1 or "moe_intermediate_size" in config
}
ENGINE_SIZES = {
    1: {"tp1": {"tensor": 1, "data": 1, "expert": False}},
    2: {"tp2": {"tensor": 2, "data": 1, "expert": False}, "tp2-ep": {"tensor": 2, "data": 1, "expert": True}},
}


def engine_cases(world_size: int) -> dict[str, dict]:
    return {
        f"{family} {name}": {"config": config} | sizes
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


@pytest.fixture(scope="module", params=[1, 2])
def engine_ranks(request, tmp_path_factory):
    size = request.param
    return size, run_ranks("engine_parameters_process.py", size, engine_cases(size), tmp_path_factory.mktemp(f"engine{size}"))


def test_engine_parameters_are_those_of_vllms_model(engine_ranks):
    size, ranks = engine_ranks
    for name, case in engine_cases(size).items():
        parallel = EngineParallel(tensor=case["tensor"], data=case["data"], expert=case["expert"])
        for rank in range(size):
            real = {n: value for n, value in ranks[rank][name].items() if n.rsplit(".", 1)[1] not in _KV_CACHE_SCALES}
            expected = {}
            for parameter in engine_shards(case["config"], parallel, rank):
                expected[parameter.name] = [list(parameter.shape), parameter.dtype]
                if parameter.fp8:
                    expected[scale_name(parameter.name)] = [list(parameter.scale_shape), "float32"]
            assert expected == real, (name, rank)


@pytest.mark.parametrize("spec", ["te", "te_norms", "local"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_names_agree_with_the_table_that_ran_on_a_gpu(family, spec):
    config = tiny_configs()[family]
    for parameter in megatron_shards(config, MegatronParallel(), 0, spec=spec):
        assert hf_sources(parameter.name) == list(dict.fromkeys(part.hf_name for part in parameter.parts))
