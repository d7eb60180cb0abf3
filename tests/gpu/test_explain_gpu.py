"""``align explain`` on a Hopper GPU: every cause swapped on one live engine, dense and mixture of experts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from e2e_fp8.config.alignment import CAUSES
from e2e_fp8.config.alignment_explain import WHAT_IF

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "run.backend": "cuda",
    "rollout.kv_cache_gib": 4,
    "rollout.max_num_seqs": 48,
    "training.warm_start.steps": 30,
    "rollout.temperature": 0.8,
}


@pytest.fixture(scope="module", params=["quickstart_dense", "quickstart"])
def explained(request, tmp_path_factory) -> tuple[str, subprocess.CompletedProcess, dict]:
    out = tmp_path_factory.mktemp("explain")
    words = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "e2e_fp8.cli.main", "align", "explain", f"configs/{request.param}.yaml", "--out", str(out)]
    done = subprocess.run([*command, "--prompts", "6", *words], capture_output=True, text=True, timeout=590, cwd=ROOT)
    assert (out / "explain.json").exists(), done.stderr[-5000:]
    return request.param, done, json.loads((out / "explain.json").read_text())


def test_the_baseline_is_zero_and_every_cause_is_measured_or_named(explained):
    config, done, record = explained
    assert done.returncode == 0, done.stderr[-3000:]
    assert record["baseline_is_zero"]
    rows = {row["name"]: row for row in record["rows"]}
    causes = {name for name, cause in CAUSES.items() if config == "quickstart" or not cause.moe_only}
    assert rows.keys() == {"baseline", "total", *causes, *(WHAT_IF.keys() - record["not_measured"].keys())}
    missing = record["not_measured"].keys() & WHAT_IF.keys()
    assert missing <= {"staleness"} | ({"moe_backend"} if config == "quickstart_dense" else set())
    assert all(name in done.stdout for name in (*rows, *record["not_measured"]))
    assert all(row["metrics"]["abs_max"] < float("inf") for row in rows.values())


def test_sizes_are_those_of_the_causes(explained):
    """Not the norms': they differ in 7.6e-6 of elements, which a few prompts need not show."""
    config, _, record = explained
    sizes = {row["name"]: row["metrics"]["abs_max"] for row in record["rows"]}
    for name in ("kv_precision", "sampling_temperature", "sampling_top_p", "weight_scale_format", "activation_scale_format", "rotary"):
        assert sizes[name] > 0, name
    assert sizes["gemm_cutlass"] == 0, "CUTLASS and DeepGEMM are known to agree bit for bit"
    if config == "quickstart":
        assert sizes["moe_backend"] > 0
        assert next(row["changed_experts"] for row in record["rows"] if row["name"] == "baseline") == [0, 0]


def test_modules_are_compared_where_both_sides_show_them(explained):
    _, _, record = explained
    names = {module["module"].rpartition(".")[2] for module in record["modules"]}
    assert {"embedding", "qkv", "attention", "o_proj", "mlp", "logits"} <= names
    assert not names & set(record["hidden_modules"])
    assert {"input_norm"} <= set(record["hidden_modules"])


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_swapped_products_are_products(rows):
    from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, quantize_blockwise
    from e2e_fp8.numerics.formats import E4M3
    from e2e_fp8.numerics.row_invariant import quantize_activations
    from e2e_fp8.rollout.swapped_kernels import PRODUCTS

    codes, scale_inv = quantize_activations(torch.randn(rows, 384, device="cuda").bfloat16(), column_major=True)
    weight = quantize_blockwise(torch.randn(256, 384).bfloat16(), E4M3, "128x128", power_2_scale=False, amax_epsilon=0.0)
    right = dequantize_blockwise(weight).double().cuda()
    left = dequantize_blockwise(BlockScaled(codes, scale_inv.contiguous(), "1x128")).double()
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    for name, product in PRODUCTS.items():
        found = product(codes, scale_inv, weight.codes.cuda(), weight.scale_inv.cuda())
        # one rounding to BF16, and sums of 384 terms in at least 14 bits (Hopper's FP8 accumulators)
        assert bool(((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-12 * size).all()), name
