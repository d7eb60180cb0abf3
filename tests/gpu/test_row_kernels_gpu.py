"""The operators that trainer and engine share, on a Hopper GPU: their definition, and rows that do not know the rows beside them."""

import pytest
import torch
import torch.nn.functional as F

from e2e_fp8.numerics import row_invariant
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3

pytestmark = pytest.mark.gpu

ROWS = 300
BF16_HALF_STEP = 2.0**-8
FP32_HALF_STEP = 2.0**-24


@pytest.fixture(autouse=True)
def fresh_seed():
    """Print the seed, so that a failure can be repeated."""
    print("torch seed", torch.seed())


def normal(*shape, spread=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * torch.exp2(spread * torch.randn(*shape, device="cuda"))).to(dtype)


def assert_rows_alone(operator, *rows):
    """``operator`` of some rows is those rows of its result for all: alone, in batches, in another order, beside rows that are NaN."""
    whole = operator(*rows)
    whole = whole if isinstance(whole, tuple) else (whole,)
    chosen = [torch.tensor([n]) for n in (0, 7, 299)] + [torch.arange(n) + 5 for n in (7, 64, 128)] + [torch.randperm(ROWS)]
    for index in chosen:
        index = index.cuda()
        part = operator(*(t[index] for t in rows))
        for expected, found in zip(whole, part if isinstance(part, tuple) else (part,), strict=True):
            assert torch.equal(found, expected[index]), len(index)
    spoiled = [t.clone() for t in rows]
    for t in spoiled:
        if t.is_floating_point():
            t[11::3] = torch.nan
    part = operator(*spoiled)
    for expected, found in zip(whole, part if isinstance(part, tuple) else (part,), strict=True):
        assert torch.equal(found[:11], expected[:11])


def assert_rounded_once(found, exact, slack=0.0, half_step=BF16_HALF_STEP):
    error = (found.double() - exact).abs()
    assert bool((error <= 1.001 * half_step * exact.abs() + slack).all()), float(error.max())


@pytest.mark.parametrize("width", [64, 128, 200, 1024, 2048, 4096, 8192])
def test_rms_norm(width):
    x, weight = normal(ROWS, width), normal(width)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    assert_rounded_once(row_invariant.rms_norm(x, weight, 1e-6), exact)
    assert_rows_alone(lambda t: row_invariant.rms_norm(t, weight, 1e-6), x)
    residual = normal(ROWS, width)
    normed, total = row_invariant.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, row_invariant.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("width", [64, 128])
def test_rms_norm_of_heads_inside_a_fused_projection(width):
    fused, weight = normal(ROWS, 1, 10 * width), normal(width)
    heads = fused.unflatten(-1, (10, width))[:, :, 3:7]
    expected = row_invariant.rms_norm(heads.contiguous(), weight, 1e-6)
    assert torch.equal(row_invariant.rms_norm(heads, weight, 1e-6), expected)
    assert torch.equal(row_invariant.rms_norm(heads[:, 0], weight, 1e-6), expected[:, 0])
    assert torch.equal(row_invariant.rms_norm(heads[5:6, 0], weight, 1e-6), expected[5:6, 0])


@pytest.mark.parametrize("width", [64, 768, 12288])
def test_silu_and_mul(width):
    gate, up = normal(ROWS, width), normal(ROWS, width)
    silu = row_invariant.silu_and_mul(torch.cat([gate, torch.ones_like(up)], -1))
    assert_rounded_once(silu, F.silu(gate.double()), 1e-38)
    both = torch.cat([gate, up], -1)
    assert torch.equal(row_invariant.silu_and_mul(both), silu * up)
    assert_rows_alone(row_invariant.silu_and_mul, both)
    print("differs from torch's silu * up in", float((row_invariant.silu_and_mul(both) != F.silu(gate) * up).float().mean()))


@pytest.mark.parametrize("width", [32, 64, 128])
def test_rotation_is_that_of_the_cpu(width):
    fused, positions = normal(ROWS, 9, width), torch.randint(0, 5000, (ROWS,), device="cuda")
    cos, sin = (values[positions] for values in row_invariant.rotary_table(1e6, width, 5000, fused.device))
    x = fused[:, 2:6]
    found = row_invariant.rotate(x, cos, sin)
    assert torch.equal(found.cpu(), row_invariant.rotate(x.cpu(), cos.cpu(), sin.cpu()))
    assert_rows_alone(row_invariant.rotate, x, cos, sin)


@pytest.mark.parametrize(("outputs", "width"), [(8, 128), (32, 1024), (128, 2048), (256, 4096), (112, 256), (5003, 1024), (151_936, 512)])
def test_matmul(outputs, width):
    x, weight = normal(ROWS, width, spread=0.0), normal(outputs, width, spread=0.0)
    exact = x.double() @ weight.double().t()
    # of the sums: the tensor core keeps at least 24 bits of each, and truncates
    slack = 2 * width * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    operands = [(x, weight)] + ([(x.float(), weight)] if outputs <= 256 else [])
    for left, right in operands:
        found = row_invariant.matmul_fp32(left, right)
        assert found.dtype == torch.float32
        assert bool(((found.double() - exact).abs() <= slack).all())
        assert_rows_alone(lambda t, w=right: row_invariant.matmul_fp32(t, w), left)


@pytest.mark.parametrize("experts", [4, 11, 128, 256])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing(experts, renormalize):
    logits = normal(ROWS, experts, dtype=torch.float32)
    ties = torch.randint(-3, 4, (ROWS, experts), device="cuda").float()
    k = min(8, experts)
    for scores in (logits, ties):
        ids = row_invariant.top_k(scores, k)
        assert torch.equal(ids.cpu(), row_invariant.top_k(scores.cpu(), k))
        weights = row_invariant.router_weights(scores, ids, renormalize=renormalize)
        probabilities = scores.double().softmax(-1).gather(1, ids)
        exact = probabilities / probabilities.sum(-1, keepdim=True) if renormalize else probabilities
        assert_rounded_once(weights, exact, half_step=FP32_HALF_STEP)
        assert_rows_alone(lambda t: row_invariant.top_k(t, k), scores)
        assert_rows_alone(lambda t, i: row_invariant.router_weights(t, i, renormalize=renormalize), scores, ids)
    garbage = torch.full_like(logits, torch.nan)
    assert row_invariant.top_k(garbage, k).tolist() == [list(range(k))] * ROWS


def test_combine_is_that_of_the_cpu():
    outputs, weights = normal(ROWS, 8, 2048), torch.rand(ROWS, 8, device="cuda")
    expected = row_invariant.combine(outputs.cpu(), weights.cpu())
    assert torch.equal(row_invariant.combine(outputs, weights).cpu(), expected)
    order = torch.randperm(ROWS * 8, device="cuda")
    rows = order.argsort().view(ROWS, 8)
    for integers in (rows, rows.int()):
        assert torch.equal(row_invariant.combine(outputs.view(-1, 2048)[order], weights, integers).cpu(), expected)
    assert_rows_alone(row_invariant.combine, outputs, weights)


@pytest.mark.parametrize("amax_epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("power_2_scale", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantizer_is_the_packages_and_transformer_engines(dtype, power_2_scale, amax_epsilon):
    from test_quantizer_gpu import INPUTS, te_blocks

    options = {"power_2_scale": power_2_scale, "amax_epsilon": amax_epsilon}
    for make in INPUTS:
        x = make(dtype)
        expected = quantize_blockwise(x, E4M3, "1x128", **options)
        references = [expected, te_blocks(x, E4M3, power_2_scale, amax_epsilon)[0]]
        for column_major in (False, True):
            codes, scale_inv = row_invariant.quantize_activations(x.cuda(), **options, column_major=column_major)
            for reference in references:
                assert torch.equal(scale_inv.cpu(), reference.scale_inv.cpu()), make.__name__
                assert torch.equal(codes.view(torch.uint8).cpu(), reference.codes.view(torch.uint8).cpu()), make.__name__


HEADS = [(32, 8, 128), (8, 4, 128), (4, 1, 128), (16, 16, 64), (8, 2, 64), (4, 2, 32)]
LENGTHS = [1, 5, 127, 128, 129, 300, 17]


def packed(heads, groups, width):
    """``(q, k, v, boundaries)`` of packed sequences; keys and values as views of a fused projection."""
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    fused = normal(sum(LENGTHS), heads + 2 * groups, width, spread=0.0)
    return fused[:, :heads].contiguous(), fused[:, heads : heads + groups], fused[:, heads + groups :], cu_seqlens


def cached(k, v, cu_seqlens, block_size):
    """Keys and values side by side in shuffled blocks, NaN where nothing was written: ``(key cache, value cache, block table)``."""
    (_, groups, width), bounds = k.shape, cu_seqlens.tolist()
    used = [-(-length // block_size) for length in LENGTHS]
    order = torch.randperm(sum(used) + 3).int()
    cache = torch.full((len(order), groups, block_size, 2 * width), torch.nan, dtype=k.dtype, device="cuda").transpose(1, 2)
    table, taken = torch.zeros(len(LENGTHS), max(used), dtype=torch.int32), 0
    for sequence, count in enumerate(used):
        table[sequence, :count] = order[taken : taken + count]
        taken += count
        for place, token in enumerate(range(bounds[sequence], bounds[sequence + 1])):
            block = int(table[sequence, place // block_size])
            cache[block, place % block_size] = torch.cat([k[token], v[token]], -1)
    # what vLLM holds where nothing was written is some finite number
    cache[cache.isnan()] = 3.0
    return cache[..., :width], cache[..., width:], table.cuda()


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
def test_packed_attention_is_its_definition_and_keeps_sequences_apart(heads, groups, width):
    q, k, v, cu_seqlens = packed(heads, groups, width)
    out, lse = row_invariant.packed_attention(q, k, v, (cu_seqlens, cu_seqlens), width**-0.5, (max(LENGTHS),) * 2)
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        queries, keys, values = (t[first:last].double().transpose(0, 1) for t in (q, k, v))
        keys, values = (t.repeat_interleave(heads // groups, 0) for t in (keys, values))
        scores = queries @ keys.transpose(1, 2) * width**-0.5
        scores = scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf)
        exact = (scores.softmax(-1) @ values).transpose(0, 1)
        assert float((out[first:last].double() - exact).norm() / exact.norm()) < BF16_HALF_STEP
        assert float((lse[:, first:last].double() - scores.logsumexp(-1)).abs().max()) < 1e-4
        alone = torch.tensor([0, last - first], dtype=torch.int32, device="cuda")
        one = (q[first:last], k[first:last], v[first:last])
        single, _ = row_invariant.packed_attention(*one, (alone, alone), width**-0.5, (last - first,) * 2)
        assert torch.equal(single, out[first:last])


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_ranks_that_divide_the_tokens_attend_as_one(heads, groups, width, parts):
    """Bit for bit, and with its gradient up to the rounding of sums: what context parallelism asks of each rank."""
    from e2e_fp8.training.attention import Spans
    from e2e_fp8.training.context_parallel import ContextParallel
    from e2e_fp8.training.shared_functions import SharedVarlenAttention

    *leaves, cu_seqlens = packed(heads, groups, width)
    tokens = sum(LENGTHS) - sum(LENGTHS) % parts
    cu_seqlens = cu_seqlens.clamp(max=tokens)
    q, k, v = (t[:tokens].detach().requires_grad_() for t in leaves)
    upstream = normal(tokens, heads, width, spread=0.0)
    whole = Spans(cu_queries=cu_seqlens, cu_keys=cu_seqlens, max_queries=max(LENGTHS), max_keys=max(LENGTHS))
    out = SharedVarlenAttention.apply(q, k, v, whole, width**-0.5)
    expected = torch.autograd.grad(out, (q, k, v), upstream)
    found = [torch.zeros_like(t, dtype=torch.float32) for t in expected]
    for rank in range(parts):
        context = ContextParallel(rank=rank, size=parts, group=None)
        params, _ = context.layout(cu_seqlens)
        rows, keys = context.rows(tokens), params.keys
        part = SharedVarlenAttention.apply(q[rows], k[keys], v[keys], Spans.of(params), width**-0.5)
        assert torch.equal(part, out[rows])
        for total, gradient in zip(found, torch.autograd.grad(part, (q, k, v), upstream[rows]), strict=True):
            total += gradient.float()
    for total, gradient in zip(found, expected, strict=True):
        assert float((total - gradient.float()).norm() / gradient.float().norm()) < 2 * BF16_HALF_STEP


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
def test_decoding_chunks_and_cached_blocks_are_the_trainers_attention(heads, groups, width, block_size):
    q, k, v, cu_seqlens = packed(heads, groups, width)
    expected, _ = row_invariant.packed_attention(q, k, v, (cu_seqlens, cu_seqlens), width**-0.5, (max(LENGTHS),) * 2)
    keys, values, table = cached(k, v, cu_seqlens, block_size)
    ends = cu_seqlens[1:].tolist()

    def ask(counts, sequences, known=None):
        """The last ``counts`` of the first ``known`` tokens of each sequence, in one call, beside requests without queries."""
        known = [LENGTHS[s] for s in sequences] if known is None else known
        rows = torch.cat([torch.arange(n - c, n) + ends[s] - LENGTHS[s] for s, n, c in zip(sequences, known, counts, strict=True)]).cuda()
        starts = torch.tensor([0, *counts, 0, 0]).cumsum(0).int().cuda()
        lengths, chosen = torch.tensor([*known, 0, 0]).int().cuda(), table[[*sequences, 0, 0]]
        written = torch.empty_like(q[rows])
        found = row_invariant.paged_attention(q[rows], keys, values, chosen, starts, lengths, width**-0.5, max(counts), out=written)
        assert found.data_ptr() == written.data_ptr()
        assert torch.equal(found, expected[rows]), (counts, sequences, known)

    every = range(len(LENGTHS))
    ask(LENGTHS, every)  # prefill
    ask([1] * len(LENGTHS), every)  # decoding, all
    for sequence in every:
        ask([1], [sequence])
    for position in range(1, 301, 13):  # decoding, one token at a time
        ask([1], [5], [position])
    ask([1, 5, 60, 1, 129, 44, 3], every)  # chunks beside decoding
    ask([100], [5], [100])
    ask([100], [5], [200])
    ask([100, 1], [5, 3], [300, 128])


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
def test_the_attentions_gradient_is_no_worse_than_torchs(heads, groups, width):
    from e2e_fp8.training.attention import Spans, varlen_packed
    from e2e_fp8.training.shared_functions import SharedVarlenAttention

    *leaves, cu_seqlens = packed(heads, groups, width)
    upstream = normal(sum(LENGTHS), heads, width, spread=0.0)

    def exactly(q, k, v, *_):
        parts = []
        for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            queries, keys, values = (t[first:last].transpose(0, 1) for t in (q, k, v))
            keys, values = (t.repeat_interleave(heads // groups, 0) for t in (keys, values))
            scores = queries @ keys.transpose(1, 2) * width**-0.5
            scores = scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), -torch.inf)
            parts.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(parts)

    def gradients(function, dtype):
        taken = [t.detach().to(dtype).requires_grad_() for t in leaves]
        spans = Spans(cu_queries=cu_seqlens, cu_keys=cu_seqlens, max_queries=max(LENGTHS), max_keys=max(LENGTHS))
        out = function(*taken, spans, width**-0.5)
        return torch.autograd.grad(out, taken, upstream.to(dtype))

    exact = gradients(exactly, torch.float64)
    shared, native = (gradients(function, torch.bfloat16) for function in (SharedVarlenAttention.apply, varlen_packed))
    for one, other, reference in zip(shared, native, exact, strict=True):
        errors = [float((t.double() - reference).norm() / reference.norm()) for t in (one, other)]
        print("shared, native", errors)
        assert errors[0] < 1.1 * errors[1]


def test_graphs_replay_the_same_bits():
    """What an engine captures for decoding: no call waits for the device or allocates outside the graph."""
    width, experts, k = 2048, 32, 4
    x, residual, weight, gate = normal(16, width), normal(16, width), normal(width), normal(experts, width)
    q, key, value, cu_seqlens = packed(8, 4, 128)
    keys, values, table = cached(key, value, cu_seqlens, 16)
    starts, lengths = torch.arange(len(LENGTHS) + 1).int().cuda(), torch.tensor(LENGTHS).int().cuda()
    table_of = row_invariant.rotary_table(1e6, 128, 400, x.device)
    positions = torch.arange(len(LENGTHS), device="cuda")

    def step():
        normed, total = row_invariant.add_rms_norm(x, residual, weight, 1e-6)
        turned = row_invariant.rotate(q[: len(LENGTHS)], *(values[positions] for values in table_of))
        attended = row_invariant.paged_attention(turned, keys, values, table, starts, lengths, 128**-0.5, 1)
        logits = row_invariant.matmul_fp32(normed, gate)
        ids = row_invariant.top_k(logits, k)
        weights = row_invariant.router_weights(logits, ids, renormalize=True)
        combined = row_invariant.combine(normed[:, None].expand(-1, k, -1), weights)
        codes, scale_inv = row_invariant.quantize_activations(row_invariant.silu_and_mul(normed), column_major=True)
        return total, attended, combined, codes.view(torch.uint8), scale_inv

    expected = [t.clone() for t in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for t in found:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
