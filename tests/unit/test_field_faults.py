"""Faults that users of other projects met, each with the test that would catch it here. ``-``: why it cannot concern this project.

| Fault | Covered by |
|---|---|
| vllm 26197, 58157, 37806; prime-rl 3112: FP32 scales become powers of two on load | test_vllm_26197_..., test_vllm_58157_... here |
| vllm 22399, 57486: wrong scales on B200, SM12x | test_vllm_22399_57486_... here |
| vllm 38083: power-of-two scales compound over 80 layers | test_vllm_38083_... here |
| vllm 17272: [3840, 1280] into [1280, 3840] | test_vllm_17272_... here |
| vllm 17272, a second load | test_rollout_engine.py::test_live_bytes_are_the_delivered_bytes |
| vllm 45617, 28783; NeMo-RL 3226; verl 4435; sglang 25790: scales of an FP8 KV cache | test_vllm_45617_... here: refused |
| vllm 44763, 48173, 54178; sglang 3345: shards that are no multiple of 128 | test_shards_that_cut_tiles_are_refused here |
| other straddles of public models | test_layout_straddles.py::test_llama3p2_1b_key_and_value_of_a_group_share_one_tile and its neighbours |
| vime 133: w2 scales [16, 3]; 30B-A3B down: 6 columns of scales, padded to 8 | test_vime_133_... here |
| prime-rl 2714: reload dropped a tensor | test_prime_rl_2714_... here |
| prime-rl 2714, in a live engine | test_rollout_engine.py::test_refusals_name_the_cause_and_change_nothing |
| prime-rl 2714, half an update kept as the next one's | test_rollout_engine.py::test_a_torn_update_is_refused_until_a_whole_one_came |
| verl 7136: custom loader, new vLLM | test_layout_names.py::test_engine_parameters_are_those_of_vllms_model |
| verl 7136, every name of a checkpoint | test_layout_names.py::test_every_tensor_of_a_checkpoint_lies_where_vllms_own_loader_puts_it |
| verl 5459: sync while decoding | test_server_transports.py::test_update_without_a_pause_is_refused |
| verl 5683, 6393: vLLM's interfaces drift | - pinned; test_rollout_parts.py::test_view_shares_memory_and_refuses_repacked_parameters |
| verl 7232: FP8 slower than BF16 | - speed, see benchmarks |
| verl 6893, 3633, 6045: is it FP8 end to end? | test_ranks_to_engines.py::test_servers_hold_the_bytes_of_every_trainer_grid |
| verl 6377, 3984; NeMo-RL 2100; Miles 2722: correction, rejection, replay | - not layout, scales or reload |
| NeMo-RL 1164: NaN in FP8 parameters at TP2 | test_ranks_to_engines.py::test_servers_hold_the_bytes_of_every_trainer_grid |
| NeMo-RL 2081: copy_ between kernel and checkpoint layout | test_nemo_rl_2081_... here |
| TE 2892, 2911: token padding | test_ranks.py::test_a_step_on_several_ranks_is_the_step_of_one |
| TE 2393; Megatron 1863: TP2 on GPUs | test_ranks_gpu.py::test_two_ranks |
| Megatron 5083: FP8 parameters with CPU offload | test_megatron_5083_... here: not offered |
| Megatron 5470: masters read from dequantized FP8 | test_training_engine.py::test_masters_start_as_the_unrounded_initial_weights |
| SkyRL 1898; flashinfer 3650: NaN from all-zero tiles | test_skyrl_1898_... here; test_numerics_blockwise.py::test_all_zero_is_scale_one |
| slime 132; verl 4896: slow sync | - speed, see benchmarks |
"""

import math
import re
from pathlib import Path

import pytest
import torch
from layout_models import tiny_configs

from e2e_fp8.config.alignment import choices_of
from e2e_fp8.config.load import parse_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ByteMismatchError, ConfigError, EngineError, LayoutError
from e2e_fp8.export.chunks import by_chunk
from e2e_fp8.layout import EngineParallel, MegatronParallel, engine_shards, megatron_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import check
from e2e_fp8.megatron_names import whole_model_name
from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise
from e2e_fp8.numerics.linear import block_scaled_matmul
from e2e_fp8.rollout.agreement import check_agreement, planned_facts
from e2e_fp8.rollout.engine import engine_args
from e2e_fp8.rollout.environment import check_environment, rollout_environment
from e2e_fp8.sync.receipt import check_receipt, manifest_of
from e2e_fp8.sync.reshard import check_parameters, deliver, outgoing
from e2e_fp8.types import ExportedTensor

TESTS = Path(__file__).parents[1]
MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 6144}
MOE |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 8, "moe_intermediate_size": 768}
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 18432}
DEEPSEEK |= {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "moe_intermediate_size": 2048}
DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512}
DEEPSEEK |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def test_every_test_that_the_table_names_exists():
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", __doc__)
    assert len(named) > 10
    for file, test in named:
        (path,) = TESTS.rglob(file)
        assert f"def {test}(" in path.read_text(), (file, test)
    for prefix in re.findall(r"(test_\w+)_\.\.\.", __doc__):
        assert any(name.startswith(prefix) for name in globals()), prefix


def quantized(rows: int, columns: int, seed: int = 1) -> BlockScaled:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return quantize_blockwise(weight, "e4m3", "128x128", power_2_scale=False)


def worker(cfg: Config, **changes) -> dict:
    """What a healthy engine rank reports, with ``changes``."""
    facts = {"device": "cuda", "capability": [9, 0], "tensor_parallel": 1, "kv_cache_dtype": "auto", "pid": 1}
    facts["kernels"] = {"Fp8LinearMethod/DeepGemmFp8BlockScaledMMKernel": 8, "Fp8MoEMethod/DEEPGEMM": 2}
    choices = choices_of(cfg.numerics)
    facts |= {"operators": {name: operators(shared=0 if choice == "native" else 2) for name, choice in choices.items()}}
    return facts | {"environment": {}, "plan": planned_facts(cfg), "alignment": choices} | changes


def operators(*, shared: int) -> dict:
    """A report of two layers, ``shared`` of which have the trainer's operator."""
    names = ["first", "second"]
    return {"shared": shared, "native": 2 - shared, "shared_at": names[:shared], "native_at": names[shared:]}


def test_vllm_26197_the_switch_that_rounds_scales_on_load_is_off_and_refused_when_on():
    cfg = Config()
    check_agreement(cfg, [worker(cfg)])
    assert rollout_environment(cfg, device="cuda")["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    switched = {"VLLM_USE_DEEP_GEMM_E8M0": "1"}
    with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM_E8M0 is '1' but must be '0' or unset: vLLM's default of 1 requantizes"):
        check_environment(cfg, switched, device="cuda")
    with pytest.raises(ConfigError, match="VLLM_USE_DEEP_GEMM_E8M0 is '1'"):
        check_agreement(cfg, [worker(cfg, environment=switched)])
    rounding = planned_facts(cfg) | {"power_2_scale": True}
    with pytest.raises(EngineError, match="power_2_scale is False in the trainer's plan and True at rollout rank 0"):
        check_agreement(cfg, [worker(cfg, plan=rounding)])


def test_an_engine_that_was_not_told_of_the_alignment_is_refused():
    cfg = parse_config({"numerics": {"alignment": "aligned"}})
    check_agreement(cfg, [worker(cfg)])
    with pytest.raises(EngineError, match=r"rms_norm=shared, but rollout rank 0 .* was started with native"):
        check_agreement(cfg, [worker(cfg, alignment=choices_of(Config().numerics))])


def test_an_engine_whose_layers_have_another_operator_is_refused_by_name():
    cfg = parse_config({"numerics": {"alignment": "aligned"}})
    live = worker(cfg)["operators"]
    with pytest.raises(
        EngineError, match=r"residual_add=shared, but 1 layers at rollout rank 0 .* have their native operator: second\. Set"
    ):
        check_agreement(cfg, [worker(cfg, operators=live | {"residual_add": operators(shared=1)})])
    with pytest.raises(EngineError, match=r"log_softmax=shared, but 2 layers .* native operator: first, second\. Set VLLM_USE_V2"):
        check_agreement(cfg, [worker(cfg, operators=live | {"log_softmax": operators(shared=0)})])
    with pytest.raises(EngineError, match=r"temperature=shared, but rollout rank 0 .* reports no layer that could have it"):
        check_agreement(cfg, [worker(cfg, operators={name: live[name] for name in live if name != "temperature"})])
    with pytest.raises(EngineError, match=r"head=native, but 2 layers .* have their shared operator"):
        check_agreement(Config(), [worker(Config(), operators={"head": operators(shared=2)})])
    check_agreement(Config(), [worker(Config(), operators={"temperature": operators(shared=2)})])


@pytest.mark.parametrize("kernel", ["Fp8LinearMethod/MarlinFP8ScaledMMLinearKernel", "Fp8MoEMethod/MARLIN", "Fp8MoEMethod/HUMMING"])
def test_kernels_that_multiply_no_fp8_activations_are_refused(kernel):
    cfg = Config()
    with pytest.raises(EngineError, match=f"rollout rank 0 .* serves 3 layers with {kernel}, which repacks FP8 weights"):
        check_agreement(cfg, [worker(cfg, kernels={kernel: 3})])


def test_ranks_that_chose_other_kernels_than_the_first_are_refused():
    cfg = Config()
    one, other = "Fp8LinearMethod/DeepGemmFp8BlockScaledMMKernel", "Fp8LinearMethod/TritonFp8BlockScaledMMKernel"
    check_agreement(cfg, [worker(cfg, kernels={one: 8})] * 2)
    with pytest.raises(EngineError, match=f"rollout rank 1 .* serves 7 layers with {one}, rollout rank 0 8"):
        check_agreement(cfg, [worker(cfg, kernels={one: 8}), worker(cfg, kernels={one: 7, other: 1})])


def test_vllm_58157_37806_prime_rl_3112_scales_rounded_to_powers_of_two_fail_the_receipt_by_name():
    block = quantized(256, 384)
    rounded = torch.exp2(torch.ceil(torch.log2(block.scale_inv)))
    assert not torch.equal(rounded, block.scale_inv)
    codes = ExportedTensor(name="up_proj.weight", tensor=block.codes)
    sides = [manifest_of([codes, ExportedTensor(name="up_proj.weight_scale_inv", tensor=s)]) for s in (block.scale_inv, rounded)]
    check_receipt(sides[0], sides[0], policy_version=3)
    with pytest.raises(ByteMismatchError, match=r"up_proj.weight_scale_inv \(bytes differ\)") as caught:
        check_receipt(*sides, policy_version=3)
    assert "up_proj.weight (" not in str(caught.value)


@pytest.mark.parametrize("capability", [[10, 0], [12, 0]], ids=["b200", "sm120"])
def test_vllm_22399_57486_architectures_that_need_other_scales_are_refused(capability):
    cfg = Config()
    with pytest.raises(EngineError, match=r"compute capability \[1\d, 0\]: block FP8 with these kernels needs 9.0 \(Hopper\)"):
        check_agreement(cfg, [worker(cfg, capability=capability)])


def test_vllm_38083_power_of_two_scales_are_refused_where_they_compound():
    with pytest.raises(ConfigError, match="scale_format=pow2 is not supported with FP8 rollout on CUDA"):
        check_environment(Config.model_validate({"numerics": {"scale_format": "pow2"}}), {}, device="cuda")


def test_vllm_17272_a_parameter_transposed_after_loading_is_refused_before_anything_is_written():
    config = {"model_type": "qwen3", "hidden_size": 1280, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 1920}
    plan = Plan.from_config(config | {"num_attention_heads": 2, "num_key_value_heads": 1}, MegatronParallel(), EngineParallel())
    parameters = empty(plan, 0)
    check_parameters(plan, 0, parameters)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert parameters[name].shape == (3840, 1280)
    parameters[name] = parameters[name].t()
    with pytest.raises(LayoutError, match=r"gate_up_proj.weight as \[1280, 3840\], but the layout plan fills \[3840, 1280\]"):
        check_parameters(plan, 0, parameters)


def empty(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """Engine parameters, every FP8 scale NaN."""
    found = {}
    for name, shard in plan.targets(rank).items():
        found[name] = torch.zeros(math.prod(shard.shape) * getattr(torch, shard.dtype).itemsize, dtype=torch.uint8)
        found[name] = found[name].view(getattr(torch, shard.dtype)).view(shard.shape)
        if shard.fp8:
            found[scale_name(name)] = torch.full(shard.scale_shape, math.nan)
    return found


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4"])
def test_vllm_45617_28783_verl_4435_nemo_rl_3226_sglang_25790_a_quantized_kv_cache_is_refused(dtype, tmp_path):
    cfg = Config()
    assert "kv_cache_dtype" not in engine_args(cfg, tmp_path, device="cuda", is_moe=True, fp8=True)
    with pytest.raises(EngineError, match=f"keeps its KV cache in {dtype}, whose scales no weight update delivers"):
        check_agreement(cfg, [worker(cfg, kv_cache_dtype=dtype)])
    with pytest.raises(ConfigError, match=r"unknown field rollout\.kv_cache_dtype"):
        parse_config({"rollout": {"kv_cache_dtype": dtype}})


@pytest.mark.parametrize(
    ("config", "rollout_tp", "part"),
    [
        pytest.param(MOE, 4, "vLLM refuses experts of 192 rows", id="vllm_44763_768_at_tp4"),
        pytest.param(MOE | {"moe_intermediate_size": 1536}, 8, "vLLM refuses experts of 192 rows", id="vllm_48173_1536_at_tp8"),
        pytest.param(MOE | {"moe_intermediate_size": 320}, 2, "vLLM refuses experts of 160 rows", id="vllm_54178_320_at_tp2"),
        pytest.param(MOE | {"moe_intermediate_size": 320}, 4, "vLLM refuses experts of 80 rows", id="vllm_54178_320_at_tp4"),
        pytest.param(MOE | {"moe_intermediate_size": 320}, 8, "vLLM refuses experts of 40 rows", id="vllm_54178_320_at_tp8"),
        pytest.param(DEEPSEEK, 32, "mlp.down_proj.weight: vLLM refuses 576 input columns", id="sglang_3345_18432_at_tp32"),
    ],
)
def test_shards_that_cut_tiles_are_refused(config, rollout_tp, part):
    plan = Plan.from_config(config, MegatronParallel(), EngineParallel(tensor=rollout_tp), qkv_order="engine")
    with pytest.raises(LayoutError) as caught:
        check(plan)
    assert part in str(caught.value)
    works = config["moe_intermediate_size"] != 320
    assert ("These would work: --train-tp 1" in str(caught.value)) is works
    assert ("keep these modules in BF16" in str(caught.value)) is not works


def test_vime_133_down_scales_of_6_columns_come_out_of_8_and_go_into_3():
    """30B-A3B: down is [2048, 768], its scales [16, 6], stored as [16, 8]; each of two engine ranks has [16, 3] an expert."""
    config = MOE | {"num_experts": 1}
    name, source = "model.layers.0.mlp.experts.routed_experts.w2_weight", "decoder.layers.0.mlp.experts.linear_fc2.weight0"
    shard = next(p for p in megatron_shards(config, MegatronParallel(), 0) if p.name == source)
    assert (shard.scale_shape, shard.te_scale_shape) == ((16, 6), (16, 8))
    block = quantized(2048, 768)
    padded = torch.full(shard.te_scale_shape, math.nan)
    padded[:, :6] = block.scale_inv
    plan = Plan.from_config(config, MegatronParallel(), EngineParallel(tensor=2))
    for rank in range(2):
        parameters = empty(plan, rank)
        assert parameters[scale_name(name)].shape == (1, 16, 3)
        copies = [copy for copy in plan.copies(rank) if copy.target == name]
        deliver(outgoing(copies, [{source: block.codes}], [{source: padded}]), parameters)
        assert torch.equal(parameters[scale_name(name)][0], block.scale_inv[:, 3 * rank : 3 * rank + 3])
        expected = block.codes.view(torch.uint8)[:, 384 * rank : 384 * rank + 384]
        assert torch.equal(parameters[name][0].view(torch.uint8), expected)
        parameters[scale_name(name)] = torch.zeros(1, 16, 4)
        with pytest.raises(LayoutError, match=r"w2_weight_scale_inv as \[1, 16, 4\], but the layout plan fills \[1, 16, 3\]"):
            check_parameters(plan, rank, parameters)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_prime_rl_2714_no_tensor_can_be_dropped_on_either_side(family):
    config = tiny_configs()[family]
    plan, layout = Plan.from_config(config, MegatronParallel(), EngineParallel()), megatron_shards(config, MegatronParallel(), 0)
    assert plan.targets(0).keys() == {shard.name for shard in engine_shards(config, EngineParallel(), 0)}
    weights = [(whole_model_name(p.name, p.layer, p.expert), torch.empty(p.shape), None) for p in layout]
    by_chunk(weights, layout)
    for index, (name, _, _) in enumerate(weights):
        with pytest.raises(LayoutError, match=re.escape(name)):
            by_chunk(weights[:index] + weights[index + 1 :], layout)
    parameters = empty(plan, 0)
    for name in parameters:
        with pytest.raises(LayoutError, match=re.escape(f"{name} is named by the layout plan but missing from the engine")):
            check_parameters(plan, 0, {other: tensor for other, tensor in parameters.items() if other != name})


def test_nemo_rl_2081_a_piece_of_another_shape_than_its_place_is_refused():
    config = MOE | {"num_experts": 1}
    plan, name = Plan.from_config(config, MegatronParallel(), EngineParallel()), "model.layers.0.self_attn.o_proj.weight"
    source, block = "decoder.layers.0.self_attention.linear_proj.weight", quantized(2048, 4096)
    copies = [copy for copy in plan.copies(0) if copy.target == name]
    parameters = empty(plan, 0)
    parameters[name] = parameters[name].view(1024, 8192)
    with pytest.raises(LayoutError, match="needs rows to 2048"):
        deliver(outgoing(copies, [{source: block.codes}], [{source: block.scale_inv}]), parameters)


def test_megatron_5083_cpu_offload_of_the_optimizer_is_not_offered():
    with pytest.raises(ConfigError, match=r"unknown field training\.optimizer_cpu_offload"):
        parse_config({"training": {"optimizer_cpu_offload": True}})


def test_skyrl_1898_flashinfer_3650_an_all_zero_tile_has_scale_one_and_makes_no_nan():
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[128:, :128] = 0
    block = quantize_blockwise(weight, "e4m3", "128x128", power_2_scale=False)
    assert block.scale_inv[1, 0] == 1.0
    tokens = torch.zeros(4, 256)
    tokens[1] = 1.0
    tokens[2, 128:] = 1.0
    output = block_scaled_matmul(quantize_blockwise(tokens, "e4m3", "1x128", power_2_scale=False), block, torch.float32)
    assert torch.isfinite(output).all()
    assert not output[[0, 3]].any()
    assert torch.equal(output[1, 128:], output[2, 128:])
