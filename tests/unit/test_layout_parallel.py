"""Rank and layer arithmetic against Megatron-Core's and vLLM's own functions, and the size of a plan for a 671-billion model."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import pytest

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout import EngineParallel, MegatronParallel
from e2e_fp8.layout.engine import local_experts

SIZES = list(itertools.product([1, 2, 4], [1, 2], [1, 2], [1, 2, 4], [1, 2]))


@pytest.mark.parametrize(("tensor", "context", "pipeline", "expert", "expert_tensor"), SIZES)
def test_rank_coordinates_are_megatrons(tensor, context, pipeline, expert, expert_tensor):
    from megatron.core.parallel_state import RankGenerator

    parallel = MegatronParallel(tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)
    data = parallel.stage_size // (tensor * context)
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp")
    expert_data = parallel.stage_size // (expert * expert_tensor)
    experts = RankGenerator(tp=expert_tensor, ep=expert, dp=expert_data, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    assert dense.world_size == experts.world_size == parallel.world_size
    for rank in range(parallel.world_size):
        place = parallel.coordinates(rank)
        for generator, axis, found in (
            (dense, "tp", place.tensor),
            (dense, "pp", place.pipeline),
            (experts, "tp", place.expert_tensor),
            (experts, "ep", place.expert),
        ):
            group = next(group for group in generator.get_ranks(axis) if rank in group)
            assert group.index(rank) == found, axis


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "first", "last"),
    [
        (8, 1, None, None, None),
        (8, 4, None, None, None),
        (8, 2, 2, None, None),
        (12, 3, 2, None, None),
        (61, 16, None, 4, 1),
        (61, 4, None, 15, 16),
        (10, 3, None, None, 2),
        (10, 3, None, 2, None),
        (16, 4, 2, 2, 2),
        (20, 4, 2, 2, 6),
        (9, 2, None, 4, 5),
    ],
)
def test_layers_of_a_stage_are_megatrons(layers, pipeline, virtual, first, last):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    parallel = MegatronParallel(pipeline=pipeline, virtual_pipeline=virtual, first_stage_layers=first, last_stage_layers=last)
    seen = []
    for stage in range(pipeline):
        for chunk, found in enumerate(parallel.stage_layers(stage, layers)):
            vp_stage = chunk if virtual else None
            start = get_transformer_layer_offset(config, vp_stage, stage)
            assert list(found) == list(range(start, start + get_num_layers_to_build(config, vp_stage, stage)))
            seen += found
    assert sorted(seen) == list(range(layers))


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (8, 4), (8, 3), (256, 32), (160, 24), (5, 5)])
def test_experts_of_a_rank_are_vllms(experts, ranks):
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for rank in range(ranks):
        count, expert_map, _ = determine_expert_map(ranks, rank, experts)
        wanted = range(experts) if expert_map is None else [e for e in range(experts) if expert_map[e] >= 0]
        assert list(local_experts(experts, rank, ranks)) == list(wanted)
        assert count == len(wanted)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"tensor": 0}, "at least 1"),
        ({"virtual_pipeline": 2}, "needs pipeline above 1"),
        ({"expert": 8, "data": 3}, "does not divide the 3 ranks"),
    ],
)
def test_impossible_training_sizes_are_refused(sizes, part):
    with pytest.raises(LayoutError, match=part):
        MegatronParallel(**sizes)


@pytest.mark.parametrize(
    ("sizes", "layers", "part"),
    [
        ({"pipeline": 3}, 8, "do not spread evenly"),
        ({"pipeline": 2, "virtual_pipeline": 3}, 8, "does not divide the layers of every stage"),
        ({"first_stage_layers": 3}, 8, "need pipeline above 1"),
        ({"pipeline": 2, "first_stage_layers": 9}, 8, "do not spread evenly"),
    ],
)
def test_impossible_pipelines_are_refused(sizes, layers, part):
    with pytest.raises(LayoutError, match=part):
        MegatronParallel(**sizes).stage_layers(0, layers)


def test_ranks_outside_the_world_are_refused():
    with pytest.raises(LayoutError, match="ranks 0 to 3"):
        MegatronParallel(tensor=2, pipeline=2).coordinates(4)
    with pytest.raises(LayoutError, match="ranks 0 to 7"):
        EngineParallel(tensor=2, data=2, replicas=2).coordinates(8)


def test_deepseek_v3_on_256_ranks_is_planned_in_seconds_and_little_memory():
    script = Path(__file__).parents[2] / "benchmarks" / "layout_plan.py"
    file = Path(__file__).parents[1] / "data" / "hf_configs" / "DeepSeek-V3.json"
    result = subprocess.run([sys.executable, script, file], capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(result.stdout)
    assert (found["training_ranks"], found["rollout_ranks"]) == (256, 256)
    assert found["seconds"] < 10
    assert found["peak_gib"] < 2
    assert not found["imports_torch"]
    assert found["verdicts"].keys() == {"pass"}
    assert found["copies"] == found["counted_without_listing"]["copies"] > 500_000
    assert found["bytes"] == found["counted_without_listing"]["bytes"]
