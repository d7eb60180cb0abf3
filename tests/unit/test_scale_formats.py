"""Scales of weights and of activations chosen apart: one owner in the configuration, the same choice in every stage."""

import numpy as np
import pytest
import torch
from references import blockwise_reference as reference
from training_cases import fresh_generator, nll, random_batch, small_config, trained_tokens

from e2e_fp8.config.load import parse_config
from e2e_fp8.errors import ConfigError
from e2e_fp8.export.rollout_only import quantize_for_rollout
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration import environment
from e2e_fp8.rollout.agreement import planned_facts
from e2e_fp8.rollout.engine import engine_args
from e2e_fp8.rollout.environment import check_environment
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.training.tile_census import TileCensus
from e2e_fp8.types import ExportedTensor

CASES = [
    # scale_format, weight_, activation_ -> weights are powers of two, activations are
    ("fp32", None, None, False, False),
    ("pow2", None, None, True, True),
    ("fp32", "pow2", None, True, False),
    ("fp32", None, "pow2", False, True),
    ("pow2", "fp32", None, False, True),
    ("pow2", "fp32", "fp32", False, False),
]
SPLIT = pytest.mark.parametrize("weights", [True, False], ids=["weights_pow2", "activations_pow2"])


def split_config(weights: bool):
    return small_config(numerics={"weight_scale_format" if weights else "activation_scale_format": "pow2"})


def quantized(x: torch.Tensor, tile: str, power_2_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes as bytes, scale_inv) of a BF16 matrix by the slow reference."""
    codes, scale_inv = reference.quantize(x.float().numpy(), "e4m3", tile, power_2_scale, 0.0, torch.finfo(torch.bfloat16).max)
    return torch.from_numpy(codes), torch.from_numpy(scale_inv)


@pytest.mark.parametrize(("common", "weight", "activation", "weights_pow2", "activations_pow2"), CASES)
def test_every_stage_reads_the_same_choice(tmp_path, monkeypatch, common, weight, activation, weights_pow2, activations_pow2):
    numerics = {"scale_format": common, "weight_scale_format": weight, "activation_scale_format": activation}
    cfg = parse_config({"numerics": numerics})
    plan = QuantizationPlan.from_config(cfg)
    assert (plan.weight_power_2_scale, plan.power_2_scale) == (weights_pow2, activations_pow2)
    assert planned_facts(cfg)["power_2_scale"] is activations_pow2
    told = engine_args(cfg, tmp_path, device="cpu", is_moe=True, fp8=True)["additional_config"]["e2e_fp8"]
    assert told["power_2_scale"] is activations_pow2
    # FP32 scales need Transformer Engine's switch, on whichever operand
    switch = "1" if not (weights_pow2 and activations_pow2) else "0"
    monkeypatch.setenv(SCALE_VARIABLE := "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0" if switch == "1" else "1")
    with pytest.raises(ConfigError, match=rf"{SCALE_VARIABLE}=. contradicts numerics.scale_format"):
        environment.prepare_environment(environment.resolve_backend(cfg))


@pytest.mark.parametrize(
    ("numerics", "field"),
    [
        ({"scale_format": "pow2"}, "scale_format"),
        ({"activation_scale_format": "pow2"}, "activation_scale_format"),
        ({"scale_format": "pow2", "weight_scale_format": "fp32"}, "scale_format"),
        ({"weight_scale_format": "pow2"}, None),
        ({"scale_format": "pow2", "activation_scale_format": "fp32"}, None),
    ],
)
def test_cuda_takes_power_of_two_weights_and_refuses_such_activations(numerics, field):
    cfg = parse_config({"numerics": numerics})
    check_environment(cfg, {}, device="cpu")
    if field is None:
        check_environment(cfg, {}, device="cuda")
    else:
        with pytest.raises(ConfigError, match=f"^numerics.{field}=pow2 is not supported with FP8 rollout on CUDA"):
            check_environment(cfg, {}, device="cuda")


@SPLIT
def test_trainer_multiplies_each_operand_with_its_own_scales(weights):
    engine = MegatronEngine(split_config(weights))
    engine.set_learning_rate(3e-3)
    batch = random_batch([30, 17, 11], fresh_generator())
    engine.train_step([batch], nll, trained_tokens([batch]))
    masters = dict(engine.named_masters())
    for name, tensor, scale_inv in engine.named_local_weights():
        if scale_inv is not None:
            codes, scales = quantized(masters[name].bfloat16(), "128x128", power_2_scale=weights)
            assert torch.equal(tensor.view(torch.uint8), codes), name
            assert torch.equal(scale_inv, scales), name
    linear = engine.model.decoder.layers[0].self_attention.linear_proj
    x = torch.randn(7, 1, linear.weight.shape[1], generator=fresh_generator()).bfloat16()
    x_codes, x_scales = quantized(x[:, 0], "1x128", power_2_scale=not weights)
    w_codes, w_scales = quantized(linear.weight.detach(), "128x128", power_2_scale=weights)
    expected = reference.matmul(x_codes.numpy(), x_scales.numpy(), w_codes.numpy(), w_scales.numpy())
    with engine.ground.scope(), torch.no_grad():
        assert torch.equal(linear(x)[0][:, 0], torch.from_numpy(expected).bfloat16())


@SPLIT
def test_rollout_only_export_takes_the_weights_format(weights):
    weight = torch.randn(256, 128, generator=fresh_generator()).bfloat16()
    entry = ExportedTensor(name="model.layers.0.self_attn.q_proj.weight", tensor=weight)
    codes, scale_inv = (e.tensor for e in quantize_for_rollout([entry], QuantizationPlan.from_config(split_config(weights))))
    expected, scales = quantized(weight, "128x128", power_2_scale=weights)
    assert torch.equal(codes.view(torch.uint8), expected)
    assert torch.equal(scale_inv, scales)


def flushed_tiles(gradient: torch.Tensor, power_2_scale: bool) -> tuple[int, int]:
    """(tiles with a non-zero element, those of them in which E4M3 makes a non-zero element zero) of 1x128 tiles."""
    codes, _ = quantized(gradient, "1x128", power_2_scale)
    nonzero, lost = gradient.numpy() != 0, (codes.numpy() & 0x7F) == 0
    starts = range(0, gradient.shape[1], 128)
    tiles = [np.s_[row, start : start + 128] for row in range(gradient.shape[0]) for start in starts]
    return sum(bool(nonzero[t].any()) for t in tiles), sum(bool((nonzero[t] & lost[t]).any()) for t in tiles)


@pytest.mark.parametrize("numerics", [{}, {"backward_format": "e4m3", "activation_scale_format": "pow2"}], ids=["hybrid", "e4m3_pow2"])
def test_census_of_fc1_gradients_counts_the_tiles_of_each_layer(numerics):
    engine = MegatronEngine(small_config(numerics=numerics))
    counts, handles = {0: [0, 0], 1: [0, 0]}, []
    for layer, found in counts.items():
        for expert in engine.model.decoder.layers[layer].mlp.experts.local_experts:

            def count(module, inputs, output, found=found):
                def add(gradient):
                    tiles, lost = flushed_tiles(gradient.float().reshape(-1, gradient.shape[-1]), engine.plan.power_2_scale)
                    found[0], found[1] = found[0] + tiles, found[1] + lost

                if torch.is_grad_enabled() and output[0].requires_grad:
                    output[0].register_hook(add)

            handles.append(expert.linear_fc1.register_forward_hook(count))
    batches = [random_batch([50, 31], fresh_generator()), random_batch([12, 5], fresh_generator())]
    with TileCensus(engine.model, engine.plan) as census:
        engine.train_step(batches, nll, trained_tokens(batches))
    shares = [lost / tiles for tiles, lost in counts.values()]
    record = census.record()
    # the census divides whole numbers after one multiplication by a share: a few roundings of float64
    assert record["tiles/moe_fc1_gradients/out_of_e4m3_range"] == pytest.approx(sum(shares) / 2, rel=1e-12)
    assert record["tiles/moe_fc1_gradients/out_of_e4m3_range_worst"] == pytest.approx(max(shares), rel=1e-12)


def test_a_dense_model_has_no_census_of_experts():
    engine = MegatronEngine(small_config("qwen3"))
    batch = random_batch([20], fresh_generator())
    with TileCensus(engine.model, engine.plan) as census:
        engine.train_step([batch], nll, trained_tokens([batch]))
    assert "tiles/gradients/zero" in census.record()
    assert not any("moe_fc1" in name for name in census.record())
