"""Real bytes through a plan: trainer tensors quantized per rank, engine parameters compared with a gather-and-slice reference."""

import math

import pytest
import torch
from layout_cases import plan_of
from references import layout_reference as reference

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout import engine_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import check
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.sync.reshard import deliver, fill_padding, outgoing

MODELS = {
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512, "tie_word_embeddings": True},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256},
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 128}
    | {"num_experts": 4, "moe_intermediate_size": 256},
    "deepseek_v3": {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256, "moe_intermediate_size": 256}
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128},
}
LAYOUTS = {
    "qwen3": reference.Sizes(tp=2, etp=2, pp=2, vpp=2, rollout_tp=4),
    "qwen2": reference.Sizes(tp=2, etp=2, rollout_tp=2, order="engine"),
    "qwen3_moe": reference.Sizes(tp=2, pp=2, ep=2, rollout_tp=2, rollout_ep=True),
    "deepseek_v3": reference.Sizes(tp=2, ep=2, etp=1, rollout_tp=2, rollout_dp=1, rollout_ep=False),
}


def config_of(family: str) -> dict:
    return {"model_type": family, "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 100} | MODELS[family]


def quantized_ranks(config: dict, sizes: reference.Sizes):
    """Random BF16 weights, sharded by the reference, FP8 ones quantized by each rank in its own tiles; scales padded as TE does."""
    hf = reference.checkpoint(config)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(sum(a.size for a in hf.values()), generator=generator).bfloat16()
    codes_of, scale_of = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(len(values))
    ranks = []
    for chunks in reference.trainer_ranks(config, hf, sizes):
        tensors, scales = [], []
        for model in chunks:
            tensors.append({})
            scales.append({})
            for name, numbers in model.items():
                index = torch.from_numpy(numbers)
                tensor = values[index.clamp(min=0)]
                if index.dim() == 2 and reference.is_fp8(name):
                    block = quantize_blockwise(tensor, "e4m3", "128x128", power_2_scale=False, amax_epsilon=0.0)
                    tensor = block.codes
                    columns = math.ceil(block.scale_inv.shape[1] / 4) * 4
                    padded = torch.full((block.scale_inv.shape[0], columns), math.nan)
                    padded[:, : block.scale_inv.shape[1]] = block.scale_inv
                    scales[-1][name] = padded
                    codes_of[index] = tensor.view(torch.uint8)
                    scale_of[index] = block.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                        : index.shape[0], : index.shape[1]
                    ]
                tensors[-1][name] = tensor.float() if name.endswith("expert_bias") else tensor
        ranks.append((tensors, scales))
    return hf, values, codes_of, scale_of, ranks


def empty_engine(plan: Plan, config: dict, rank: int) -> dict[str, torch.Tensor]:
    """Engine parameters with every byte set, which is NaN in E4M3, BF16 and FP32."""
    parameters = {}
    for shard in engine_shards(config, plan.rollout, rank):
        dtype = getattr(torch, shard.dtype)
        parameters[shard.name] = (
            torch.full((math.prod(shard.shape) * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype).view(shard.shape)
        )
        if shard.fp8:
            parameters[scale_name(shard.name)] = torch.full(shard.scale_shape, math.nan)
    return parameters


@pytest.mark.parametrize("family", MODELS)
def test_engine_bytes_are_the_trainers_bytes(family):
    config, sizes = config_of(family), LAYOUTS[family]
    plan = plan_of(config, sizes)
    check(plan)
    hf, values, codes_of, scale_of, ranks = quantized_ranks(config, sizes)
    for rank in range(plan.rollout.world_size):
        parameters, moved = empty_engine(plan, config, rank), 0
        fill_padding(plan, rank, parameters)
        for source, (tensors, scales) in enumerate(ranks):
            moved += deliver(outgoing(plan.copies(rank, source_rank=source), tensors, scales), parameters)
        assert moved == sum(copy.nbytes for copy in plan.copies(rank))
        for name, numbers in reference.engine_rank(config, hf, sizes, rank).items():
            index, found = torch.from_numpy(numbers), parameters[name]
            if found.dtype == torch.float8_e4m3fn:
                assert torch.equal(found.view(torch.uint8), codes_of[index]), name
                grid = parameters[scale_name(name)].repeat_interleave(128, -2).repeat_interleave(128, -1)
                assert torch.equal(grid[..., : index.shape[-2], : index.shape[-1]], scale_of[index]), name
            else:
                expected = torch.where(index < 0, torch.zeros(()), values[index.clamp(min=0)].float())
                assert torch.equal(found.float(), expected), name


def test_outgoing_pieces_are_views():
    config, sizes = config_of("qwen3"), LAYOUTS["qwen3"]
    plan = plan_of(config, sizes)
    *_, ranks = quantized_ranks(config, sizes)
    tensors, scales = ranks[0]
    storages = {tensor.untyped_storage().data_ptr() for model in (*tensors, *scales) for tensor in model.values()}
    pieces = list(outgoing(plan.copies(0, source_rank=0), tensors, scales))
    assert pieces
    for piece in pieces:
        assert piece.data.untyped_storage().data_ptr() in storages
        assert piece.scale_inv is None or piece.scale_inv.untyped_storage().data_ptr() in storages


@pytest.fixture
def single():
    """One rank on both sides: plan, tensors, scales, engine parameters."""
    config, sizes = config_of("qwen3"), reference.Sizes()
    plan = plan_of(config, sizes)
    *_, ranks = quantized_ranks(config, sizes)
    return plan, *ranks[0], empty_engine(plan, config, 0)


FIRST = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t, s, p: p.update({FIRST: p[FIRST].bfloat16()}), "engine holds model.layers.0.self_attn.qkv_proj.weight as torch.bfloat16"),
        (
            lambda t, s, p: p.pop(scale_name(FIRST)),
            "qkv_proj.weight_scale_inv is named by the layout plan but missing from the engine's parameters",
        ),
        (lambda t, s, p: p.update({scale_name(FIRST): p[scale_name(FIRST)].bfloat16()}), "float32 block scales"),
        (lambda t, s, p: p.update({FIRST: p[FIRST][:-1]}), "needs rows to"),
        (lambda t, s, p: s[0].clear(), "missing from the trainer's block scales"),
        (
            lambda t, s, p: t[0].pop("decoder.layers.3.mlp.linear_fc1.weight"),
            "decoder.layers.3.mlp.linear_fc1.weight is named by the layout plan but missing from the trainer's weights",
        ),
        (
            lambda t, s, p: t[0].update({n: v.float() for n, v in t[0].items() if n.endswith("linear_qkv.weight")}),
            "trainer holds decoder.layers.0.self_attention.linear_qkv.weight as torch.float32",
        ),
    ],
)
def test_a_side_that_differs_from_the_plan_is_refused(single, change, part):
    plan, tensors, scales, parameters = single
    change(tensors, scales, parameters)
    with pytest.raises(LayoutError, match=part):
        deliver(outgoing(plan.copies(0), tensors, scales), parameters)
