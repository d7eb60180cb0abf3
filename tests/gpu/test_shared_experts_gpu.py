"""Experts of the engine with shared operators on an H200: one DeepGEMM product for each row's expert, whatever stands in the batch."""

import pytest
import torch

from e2e_fp8.numerics import row_invariant
from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.numerics.metrics import sqnr_db

pytestmark = pytest.mark.gpu
SHAPES = {"quickstart": (4, 2, 256, 128), "moe_0p5b": (32, 4, 1024, 512), "30b-a3b": (128, 8, 2048, 768)}
"""Experts, experts a token, hidden size, width of an expert."""
CAUSES = ("activation_scales", "swiglu", "combine")


@pytest.fixture(scope="module", autouse=True)
def environment():
    """vLLM's switches as the project sets them, before vLLM is imported."""
    import os

    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")


@pytest.fixture(params=list(SHAPES))
def layer(request) -> tuple[torch.nn.Module, int]:
    experts, top_k, hidden, width = SHAPES[request.param]
    module = torch.nn.Module()
    for name, shape in (("w13_weight", (experts, 2 * width, hidden)), ("w2_weight", (experts, hidden, width))):
        weights = torch.randn(shape, device="cuda") * shape[-1] ** -0.5
        parts = [quantize_blockwise(w, E4M3, "128x128", power_2_scale=False, amax_epsilon=0.0) for w in weights]
        setattr(module, name, torch.nn.Parameter(torch.stack([p.codes for p in parts]), requires_grad=False))
        setattr(module, f"{name}_scale_inv", torch.nn.Parameter(torch.stack([p.scale_inv for p in parts]), requires_grad=False))
    return module, top_k


def routed(layer: torch.nn.Module, top_k: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts, hidden = layer.w13_weight.shape[0], layer.w13_weight.shape[2]
    logits = torch.randn(tokens, experts, device="cuda")
    ids = row_invariant.top_k(logits, top_k)
    return torch.randn(tokens, hidden, device="cuda").bfloat16(), row_invariant.router_weights(logits, ids, renormalize=True), ids.int()


def run(layer: torch.nn.Module, shared=CAUSES):
    from e2e_fp8.rollout.cuda_fp8 import SharedExperts

    operators = SharedExperts(set(shared), 0.0)
    return lambda x, weights, ids: operators(layer, x, weights, ids)


def one_by_one(layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each token and expert with a product of its own."""
    from vllm.utils.deep_gemm import fp8_gemm_nt

    def product(rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(layer, name)[expert], getattr(layer, f"{name}_scale_inv")[expert]
        out = rows.new_empty(rows.shape[0], weight[0].shape[0])
        fp8_gemm_nt(row_invariant.quantize_activations(rows, column_major=True), weight, out, is_deep_gemm_e8m0_used=False)
        return out

    found = []
    for row, token_weights, experts in zip(x, weights, ids.tolist(), strict=True):
        outputs = [product(row_invariant.silu_and_mul(product(row[None], "w13_weight", e)), "w2_weight", e) for e in experts]
        found.append(row_invariant.combine(torch.stack(outputs, dim=1), token_weights[None]))
    return torch.cat(found)


def test_every_token_has_the_bits_of_its_own_products(layer):
    module, top_k = layer
    x, weights, ids = routed(module, top_k, 37)
    assert torch.equal(run(module)(x, weights, ids), one_by_one(module, x, weights, ids))


def test_a_row_keeps_its_bits_in_any_batch(layer):
    module, top_k = layer
    experts = run(module)
    x, weights, ids = routed(module, top_k, 700)
    whole = experts(x, weights, ids)
    for start, count in ((0, 1), (5, 2), (100, 64), (3, 255), (1, 699)):
        rows = slice(start, start + count)
        assert torch.equal(experts(x[rows].clone(), weights[rows].clone(), ids[rows].clone()), whole[rows]), (start, count)


def test_they_compute_the_experts(layer):
    module, top_k = layer
    x, weights, ids = routed(module, top_k, 64)
    w13, w2 = (
        torch.stack([dequantize_blockwise(BlockScaled(c, s, "128x128")) for c, s in zip(codes, scales, strict=True)]).double()
        for codes, scales in ((module.w13_weight, module.w13_weight_scale_inv), (module.w2_weight, module.w2_weight_scale_inv))
    )
    expected = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for slot in range(top_k):
        chosen = ids[:, slot].long()
        gate, up = torch.einsum("mh,mnh->mn", x.double(), w13[chosen]).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        expected += weights[:, slot : slot + 1].double() * torch.einsum("mi,mhi->mh", hidden, w2[chosen])
    assert sqnr_db(expected, run(module)(x, weights, ids).double()) > 23


@pytest.mark.parametrize("native", CAUSES)
def test_single_causes_can_be_native(layer, native):
    module, top_k = layer
    x, weights, ids = routed(module, top_k, 64)
    shared = run(module)(x, weights, ids).double()
    opened = run(module, [cause for cause in CAUSES if cause != native])(x, weights, ids).double()
    assert sqnr_db(shared, opened) > 30


def test_a_cuda_graph_replays_other_routings(layer):
    """Captured once, replayed with other tokens, weights and experts, also with padded rows of NaN."""
    module, top_k = layer
    experts = run(module)
    x, weights, ids = routed(module, top_k, 48)
    experts(x, weights, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, weights, ids)
    for padding in (0, 17):
        other, other_weights, other_ids = routed(module, top_k, 48)
        if padding:
            other[-padding:] = torch.nan
        for target, source in ((x, other), (weights, other_weights), (ids, other_ids)):
            target.copy_(source)
        graph.replay()
        real = 48 - padding
        assert torch.equal(out[:real], experts(other[:real], other_weights[:real], other_ids[:real]))


@pytest.mark.parametrize("amax_epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("width", [128, 768])
def test_the_fused_activation_is_the_composition(width, amax_epsilon):
    """Also where values are zero, huge, tiny or not numbers; rows of padding are not written."""
    from e2e_fp8.numerics.row_fused_cuda import silu_and_mul_quantized

    rows = 384
    gate_up = (torch.randn(rows, 2 * width, device="cuda") * torch.logspace(-6, 6, rows, device="cuda")[:, None]).bfloat16()
    gate_up[3] = 0
    gate_up[4, 5], gate_up[5, 7], gate_up[6, :] = torch.nan, torch.inf, 3e38
    expert = torch.randint(-1, 4, (rows,), device="cuda", dtype=torch.int32)
    expert[:8], expert[128:256] = 0, -1
    codes, scale_inv = silu_and_mul_quantized(gate_up, expert, amax_epsilon=amax_epsilon)
    expected = row_invariant.quantize_activations(row_invariant.silu_and_mul(gate_up), amax_epsilon=amax_epsilon)
    real = expert >= 0
    assert torch.equal(codes.view(torch.uint8)[real], expected[0].view(torch.uint8)[real])
    assert torch.equal(scale_inv[real].view(torch.int32), expected[1].contiguous()[real].view(torch.int32))
    assert scale_inv.stride() == (1, rows)
