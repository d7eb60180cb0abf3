"""Arithmetic of the CPU block-FP8 layers, and that a plugin vLLM did not load is noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.rollout import cpu_fp8

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.qwen3_reference import through_e4m3

EXPERTS, HIDDEN, WIDTH = 5, 256, 384


def quantizer(**options) -> cpu_fp8.ActivationQuantizer:
    with set_current_vllm_config(VllmConfig(additional_config={"e2e_fp8": {"power_2_scale": False, "amax_epsilon": 0.0} | options})):
        return cpu_fp8.ActivationQuantizer()


def expert_weights(rows: int, columns: int) -> tuple[BlockScaled, torch.Tensor]:
    """Stacked codes and scales of random experts, and the same in float64."""
    blocks = [quantize_blockwise(torch.randn(rows, columns).bfloat16(), E4M3, "128x128", power_2_scale=False) for _ in range(EXPERTS)]
    stacked = BlockScaled(torch.stack([b.codes for b in blocks]), torch.stack([b.scale_inv for b in blocks]), "128x128")
    return stacked, torch.stack([dequantize_blockwise(b) for b in blocks]).double()


@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_grouped_experts_against_a_loop_over_tokens(tokens):
    w13, w13_value = expert_weights(2 * WIDTH, HIDDEN)
    w2, w2_value = expert_weights(HIDDEN, WIDTH)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(tokens)])  # the last expert gets no token
    probabilities = torch.rand(tokens, 2)
    y = cpu_fp8.grouped_experts(x, probabilities, ids, w13, w2, quantizer())
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    errors = []
    for token in range(tokens):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for probability, expert in zip(probabilities[token], ids[token], strict=True):
            gate, up = (through_e4m3(x[token]).double() @ w13_value[expert].T).bfloat16().split(WIDTH)
            inner = (gate.double() * gate.double().sigmoid()).bfloat16() * up
            expected += probability.double() * (through_e4m3(inner).double() @ w2_value[expert].T)
        errors.append(float((y[token].double() - expected).norm() / expected.norm()))
    # Scales one ulp apart and BF16 rounding move single codes by one step of E4M3: small on average, larger in a single row.
    if tokens > 100:
        assert sum(errors) / tokens < 0.01, errors
    assert max(errors) < 0.05, errors


def test_each_token_sees_only_its_own_experts():
    w13, _ = expert_weights(2 * WIDTH, HIDDEN)
    w2, _ = expert_weights(HIDDEN, WIDTH)
    x, ids = torch.randn(6, HIDDEN).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 4], [3, 0], [4, 2], [2, 1]])
    probabilities = torch.rand(6, 2)
    before = cpu_fp8.grouped_experts(x, probabilities, ids, w13, w2, quantizer())
    w2.scale_inv[3] *= 2
    after = cpu_fp8.grouped_experts(x, probabilities, ids, w13, w2, quantizer())
    changed = (before != after).any(dim=1)
    assert changed.tolist() == [3 in row for row in ids.tolist()]


def test_activation_scales_follow_the_configured_rounding():
    x = torch.randn(3, HIDDEN).bfloat16()
    exact, power = quantizer()(x), quantizer(power_2_scale=True)(x)
    assert (torch.frexp(power.scale_inv)[0] == 0.5).all()
    assert not (torch.frexp(exact.scale_inv)[0] == 0.5).all()
    with set_current_vllm_config(VllmConfig()), pytest.raises(EngineError, match="additional_config"):
        cpu_fp8.ActivationQuantizer()


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_op_against_sorting(renormalize):
    logits = torch.randn(9, EXPERTS).bfloat16()
    weights, ids, unused = torch.empty(9, 2), torch.empty(9, 2, dtype=torch.int64), torch.empty(9, 2, dtype=torch.int32)
    cpu_fp8.register_cpu_fp8()
    torch.ops._moe_C.topk_softmax(weights, ids, unused, logits, renormalize, None)
    for row in range(9):
        p = [float(v) for v in logits[row].double().exp()]
        best = sorted(range(EXPERTS), key=lambda e: -p[e])[:2]
        assert sorted(p[e] for e in ids[row].tolist()) == sorted(p[e] for e in best)
        total = sum(p[e] for e in best) if renormalize else sum(p)
        assert weights[row].tolist() == pytest.approx([p[e] / total for e in ids[row].tolist()], rel=1e-5)


def test_registration_is_idempotent_and_complete():
    for _ in range(2):
        cpu_fp8.register_cpu_fp8()
        assert cpu_fp8.missing_registrations() == []


def test_plugin_that_vllm_did_not_load_is_an_error():
    code = "from e2e_fp8.rollout.preflight import verify_plugin_live; verify_plugin_live()"
    environ = os.environ | {"VLLM_PLUGINS": "another_plugin"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "EngineError: vLLM did not load plugin e2e_fp8: weight transfer engine e2e_fp8_local, CPU block-FP8" in done.stderr
