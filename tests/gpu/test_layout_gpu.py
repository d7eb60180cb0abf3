"""Names and shapes of Megatron's Transformer Engine specs against the layout, on one GPU."""

import pytest

pytestmark = pytest.mark.gpu


def test_trainer_parameters_are_those_of_megatrons_transformer_engine_model(tmp_path):
    pytest.importorskip("transformer_engine")
    from unit.layout_models import run_ranks, tiny_configs

    from e2e_fp8.layout import MegatronParallel, megatron_shards

    sizes = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1}
    cases = {family: {"config": config, "spec": "te"} | sizes for family, config in tiny_configs().items()}
    (found,) = run_ranks("trainer_parameters_process.py", 1, cases, tmp_path)
    for family, case in cases.items():
        shards = megatron_shards(case["config"], MegatronParallel(), 0, spec="te")
        assert [{p.name: list(p.shape) for p in shards}] == found[family], family
