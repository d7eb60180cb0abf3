"""The shared operators on CUDA: Triton kernels whose result for one row does not depend on the rows beside it. Imported on first use.

Why a row keeps its bits: a row's sums run inside one program, in an order that the compiled kernel fixes; and one kernel is compiled for
all calls of a width. So row counts, strides and positions are not specialised on (Triton would compile other loads, and with them another
order of sums, for 1 row, for multiples of 16, or for other alignments), and products are not contracted with sums. No call waits for the
device or looks at values, so all of them can be captured in CUDA graphs. Legend: as row_invariant.
"""

from typing import Any

import torch

from e2e_fp8.errors import UserError
from e2e_fp8.numerics.formats import E4M3, TILE

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise UserError(
        "Shared operators on a GPU need Triton, which is not installed: install it, or set numerics.alignment to fast."
    ) from error

_ALIGNED_ELEMENTS = 8
"""Rows start at multiples of this many elements (16 bytes of BF16), which the kernels' loads assume."""
_E4M3_MAX = tl.constexpr(E4M3.max_value)
_NAN_CODE = tl.constexpr(E4M3.nan_code)
_TILE = tl.constexpr(TILE)


def _options(**constants: Any) -> dict[str, Any]:
    """Constants and options of a launch; products are not contracted with sums."""
    return {**constants, "enable_fp_fusion": False}


def rows_aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where its last axis is not contiguous or its rows do not start at 16 bytes."""
    fits = x.stride(-1) == 1 and all(s % _ALIGNED_ELEMENTS == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _as_3d(x: torch.Tensor) -> torch.Tensor:
    """``[A, B, K]`` with the same rows in the same order, a view if ``x`` has at most three axes."""
    return x.view(1, *x.shape) if x.dim() == 2 else x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1])


@triton.jit(do_not_specialize=["rows", "a_stride", "b_stride", "count"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rows, a_stride, b_stride, count, epsilon, K: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows: ``x[a, b]`` of ``count`` rows b for each a; with a residual, of the rounded sum of the two (contiguous rows)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    a_stride, b_stride = a_stride.to(tl.int64), b_stride.to(tl.int64)
    if K % 8 == 0:
        a_stride, b_stride = tl.multiple_of(a_stride, 8), tl.multiple_of(b_stride, 8)
    # 32 bits: a division of 64 takes longer than the row
    start = (row // count) * a_stride + (row % count) * b_stride
    lies = row.to(tl.int64)[:, None] * K + column[None, :]
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
    if residual_ptr is not None:
        x = (x.to(tl.float32) + tl.load(residual_ptr + lies, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + lies, x, mask=inside)
    x32 = x.to(tl.float32)
    mean = tl.math.div_rn(tl.sum(x32 * x32, axis=1), tl.full((ROWS,), K * 1.0, tl.float32))
    factor = tl.math.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.math.sqrt_rn(mean + epsilon))
    weight = tl.load(weight_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + lies, (x32 * factor[:, None] * weight[None, :]).to(x.dtype), mask=inside)


def _launch_norm(
    x: torch.Tensor, residual: Any, weight_K: torch.Tensor, out: torch.Tensor, total: Any, epsilon: float, steps: tuple[int, int, int]
) -> None:
    """``steps`` are the strides of a row's two indices and the number of rows b."""
    width = x.shape[-1]
    rows, block = out.numel() // width, max(16, triton.next_power_of_2(width))
    # heads are narrow: a program for each would take longer to start than to run
    together = max(1, 2048 // block) if block <= 256 else 1
    options = _options(K=width, BLOCK=block, ROWS=together, num_warps=4 if block <= 2048 else 8)
    grid = (triton.cdiv(rows, together),)
    weight_K = rows_aligned(weight_K)
    _rms_norm[grid](x, residual, weight_K, out, total, rows, steps[0], steps[1], steps[2], float(epsilon), **options)


def rms_norm(x: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As row_invariant.rms_norm; ``x`` may be strided (heads inside a fused projection), the result is contiguous."""
    rows, out = rows_aligned(_as_3d(x)), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        # a stride that is not used may be above 32 bits, and Triton would compile another kernel for it
        a_stride = 0 if rows.shape[0] == 1 else rows.stride(0)
        _launch_norm(rows, None, weight_K, out, None, epsilon, (a_stride, rows.stride(1), rows.shape[1]))
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight_K: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As row_invariant.add_rms_norm."""
    x, residual, width = rows_aligned(x.contiguous()), rows_aligned(residual.contiguous()), x.shape[-1]
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _launch_norm(x, residual, weight_K, normed, total, epsilon, (width, width, 1))
    return normed, total


_SPAN = 1024
"""Elements of a row that one program of an element-wise kernel handles."""


@triton.jit
def silu_product(gate, up):
    """silu of BF16 ``gate``, rounded, times ``up``, rounded: inlined wherever the shared SwiGLU is computed."""
    gate32 = gate.to(tl.float32)
    silu = tl.math.div_rn(gate32, 1.0 + tl.exp(-gate32)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["stride"])
def _silu_and_mul(x_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if WIDTH % 8 == 0:
        stride = tl.multiple_of(stride.to(tl.int64), 8)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride + WIDTH + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, silu_product(gate, up), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As row_invariant.silu_and_mul."""
    width = gate_up.shape[-1] // 2
    rows = rows_aligned(gate_up.reshape(-1, 2 * width))
    out = torch.empty(rows.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(width, _SPAN))
        _silu_and_mul[grid](rows, out, rows.stride(0), **_options(WIDTH=width, BLOCK=_SPAN))
    return out.view(*gate_up.shape[:-1], width)


@triton.jit(do_not_specialize=["t_stride", "n_stride", "cos_stride", "sin_stride"])
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, t_stride, n_stride, cos_stride, sin_stride, N: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``HEADS`` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    inside = (head < N)[:, None] & (pair < HALF)[None, :]
    t_stride, n_stride = t_stride.to(tl.int64), n_stride.to(tl.int64)
    if HALF % 8 == 0:
        t_stride, n_stride = tl.multiple_of(t_stride, 8), tl.multiple_of(n_stride, 8)
        cos_stride, sin_stride = tl.multiple_of(cos_stride.to(tl.int64), 8), tl.multiple_of(sin_stride.to(tl.int64), 8)
    first_ptr = x_ptr + token * t_stride + (head * n_stride)[:, None] + pair[None, :]
    first = tl.load(first_ptr, mask=inside, other=0.0)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + pair, mask=pair < HALF, other=0.0)[None, :]
    first32 = first.to(tl.float32)
    out = out_ptr + (token * N + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(out, (first32 * cos - second * sin).to(first.dtype), mask=inside)
    tl.store(out + HALF, (second * cos + first32 * sin).to(first.dtype), mask=inside)


def rotate(x_TND: torch.Tensor, cos_Td: torch.Tensor, sin_Td: torch.Tensor) -> torch.Tensor:
    """As row_invariant.rotate; everything may be strided but for the last axis, the result is contiguous."""
    x_TND, cos_Td, sin_Td = rows_aligned(x_TND), rows_aligned(cos_Td), rows_aligned(sin_Td)
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    (tokens, heads, width), block = x_TND.shape, triton.next_power_of_2(x_TND.shape[2] // 2)
    if out.numel():
        together = min(triton.next_power_of_2(heads), max(1, 2 * _SPAN // block))
        strides = (x_TND.stride(0), x_TND.stride(1), cos_Td.stride(0), sin_Td.stride(0))
        options = _options(N=heads, HALF=width // 2, HEADS=together, BLOCK=block)
        _rotate[(tokens, triton.cdiv(heads, together))](x_TND, cos_Td, sin_Td, out, *strides, **options)
    return out


@triton.jit(do_not_specialize=["M"])
def _matmul(
    x_ptr, w_ptr, out_ptr, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    """One tile of ``out [M, N] = x [M, K] @ w [N, K].T``; programs of GROUP tile rows read the same weights one after another."""
    program = tl.program_id(0)
    across: tl.constexpr = (N + BN - 1) // BN
    first_tile_row = program // (GROUP * across) * GROUP
    tile_rows = tl.minimum(tl.cdiv(M, BM) - first_tile_row, GROUP)
    within = program % (GROUP * across)
    row = ((first_tile_row + within % tile_rows) * BM + tl.arange(0, BM)).to(tl.int64)
    column = (within // tile_rows * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.arange(0, BK)
    x_tile = x_ptr + row[:, None] * K + k[None, :]
    w_tile = w_ptr + column[None, :] * K + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            x = tl.load(x_tile, mask=row[:, None] < M, other=0.0)
            w = tl.load(w_tile, mask=column[None, :] < N, other=0.0)
        else:
            x = tl.load(x_tile, mask=(row[:, None] < M) & (k[None, :] < K - start), other=0.0)
            w = tl.load(w_tile, mask=(column[None, :] < N) & (k[:, None] < K - start), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_tile += BK
        w_tile += BK
    tl.store(out_ptr + row[:, None] * N + column[None, :], total, mask=(row[:, None] < M) & (column[None, :] < N))


def matmul_fp32(x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """As row_invariant.matmul_fp32: BF16 operands in tensor cores, others widened to FP32; one tile shape for every number of rows."""
    (outputs, width), dtypes = weight_NK.shape, {x.dtype, weight_NK.dtype}
    if dtypes != {torch.bfloat16}:
        x, weight_NK = x.float(), weight_NK.float()
        tile = {"BM": 32, "BN": 32, "BK": 32, "GROUP": 32, "num_warps": 4, "num_stages": 2}
    elif outputs <= 512:
        tile = {"BM": 32, "BN": 32, "BK": 128, "GROUP": 32, "num_warps": 4, "num_stages": 3}
    else:
        tile = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 16, "num_warps": 8, "num_stages": 3}
    rows, weight_NK = rows_aligned(x.reshape(-1, width).contiguous()), rows_aligned(weight_NK.contiguous())
    out = torch.empty(rows.shape[0], outputs, dtype=torch.float32, device=x.device)
    if out.numel():
        grid = (triton.cdiv(rows.shape[0], tile["BM"]) * triton.cdiv(outputs, tile["BN"]),)
        _matmul[grid](rows, weight_NK, out, rows.shape[0], **_options(N=outputs, K=width, **tile))
    return out.view(*x.shape[:-1], outputs)


@triton.jit(do_not_specialize=["stride"])
def _top_k(logits_ptr, ids_ptr, stride, E: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + expert, mask=expert < E, other=0.0)
    logits = tl.where(logits != logits, float("-inf"), logits)  # rows of padding may be NaN; their experts must exist all the same
    free = expert < E
    for slot in tl.static_range(SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
        largest = tl.max(tl.where(free, logits, float("-inf")), axis=0)
        best = tl.min(tl.where(free & (logits == largest), expert, BLOCK), axis=0)
        tl.store(ids_ptr + row * SLOTS + slot, best.to(tl.int64))
        free = free & (expert != best)


def top_k(logits_ME: torch.Tensor, k: int) -> torch.Tensor:
    """As row_invariant.top_k; NaN counts as the smallest."""
    logits_ME = logits_ME.float() if logits_ME.stride(-1) == 1 else logits_ME.float().contiguous()
    (rows, experts), block = logits_ME.shape, triton.next_power_of_2(logits_ME.shape[1])
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits_ME.device)
    if rows:
        _top_k[(rows,)](logits_ME, ids, logits_ME.stride(0), **_options(E=experts, SLOTS=k, BLOCK=block, num_warps=1))
    return ids


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits_ptr", "ids_ptr", "weights_ptr"])
def _router_weights(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOT_BLOCK)
    logits = tl.load(logits_ptr + row * stride + expert, mask=expert < E, other=float("-inf")).to(tl.float64)
    largest = tl.max(logits, axis=0)
    chosen = tl.load(ids_ptr + row * SLOTS + slot, mask=slot < SLOTS, other=0)
    exponential = tl.exp(tl.load(logits_ptr + row * stride + chosen).to(tl.float64) - largest)
    total = tl.sum(tl.exp(logits - largest), axis=0) if ALL else tl.sum(tl.where(slot < SLOTS, exponential, 0.0), axis=0)
    tl.store(weights_ptr + row * SLOTS + slot, (exponential / total).to(tl.float32), mask=slot < SLOTS)


def router_weights(logits_ME: torch.Tensor, ids_Mk: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    """As row_invariant.router_weights, float64 inside."""
    logits_ME = logits_ME.float() if logits_ME.stride(-1) == 1 else logits_ME.float().contiguous()
    weights = torch.empty(ids_Mk.shape, dtype=torch.float32, device=logits_ME.device)
    (rows, experts), k = logits_ME.shape, ids_Mk.shape[1]
    if rows:
        shape = {"E": experts, "SLOTS": k, "BLOCK": triton.next_power_of_2(experts), "SLOT_BLOCK": triton.next_power_of_2(k)}
        _router_weights[(rows,)](
            logits_ME, ids_Mk.contiguous(), weights, logits_ME.stride(0), **_options(ALL=not renormalize, **shape, num_warps=1)
        )
    return weights


@triton.jit(do_not_specialize=["stride"])
def _combine(outputs_ptr, rows_ptr, weights_ptr, out_ptr, stride, SLOTS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    if H % 8 == 0:
        stride = tl.multiple_of(stride.to(tl.int64), 8)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
        row = token * SLOTS + slot
        if rows_ptr is not None:
            row = tl.load(rows_ptr + row).to(tl.int64)
        value = tl.load(outputs_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        weighted = value * tl.load(weights_ptr + token * SLOTS + slot)
        # not 0 + weighted: the sign of a zero would go
        total = weighted if slot == 0 else total + weighted
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(outputs: torch.Tensor, weights_Mk: torch.Tensor, rows_Mk: torch.Tensor | None = None) -> torch.Tensor:
    """As row_invariant.combine; with ``rows_Mk`` (any integers) of the rows of ``outputs [A, H]`` that it names."""
    (tokens, slots), width = weights_Mk.shape, outputs.shape[-1]
    rows = rows_aligned(outputs.reshape(-1, width))
    out = torch.empty(tokens, width, dtype=outputs.dtype, device=outputs.device)
    if out.numel():
        named = None if rows_Mk is None else rows_Mk.contiguous()
        _combine[(tokens, triton.cdiv(width, _SPAN))](
            rows, named, weights_Mk.float().contiguous(), out, rows.stride(0), **_options(SLOTS=slots, H=width, BLOCK=_SPAN)
        )
    return out


_TILES = 16
"""Quantization tiles of one program."""


@triton.jit
def quantized_tiles(x, amax_epsilon, LARGEST: tl.constexpr, POWER_2: tl.constexpr, TILES: tl.constexpr):
    """``(codes uint8 [TILES, 128], scale_inv [TILES])`` of FP32 ``[TILES, 128]``: inlined wherever activations are quantized.

    See e2e_fp8.numerics.blockwise; the largest value of a tile does not depend on an order.
    """
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    amax = tl.where(amax < amax_epsilon, amax_epsilon, amax)
    degenerate = (amax == 0.0) | (amax == float("inf"))
    quant_scale = tl.math.div_rn(tl.full((TILES,), _E4M3_MAX, tl.float32), tl.where(degenerate, _E4M3_MAX, amax))
    quant_scale = tl.where(quant_scale == float("inf"), LARGEST, quant_scale)
    if POWER_2:
        quant_scale = (quant_scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    scaled = x * quant_scale[:, None]
    clamped = tl.where(scaled > _E4M3_MAX, _E4M3_MAX, tl.where(scaled < -_E4M3_MAX, -_E4M3_MAX, scaled))
    codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    codes = tl.where(scaled == scaled, codes, _NAN_CODE).to(tl.uint8)
    return codes, tl.math.div_rn(tl.full((TILES,), 1.0, tl.float32), quant_scale)


@triton.jit(do_not_specialize=["tiles", "stride", "row_step", "tile_step"])
def _quantize(
    x_ptr, codes_ptr, scale_inv_ptr, tiles, stride, row_step, tile_step, amax_epsilon, K: tl.constexpr, LARGEST: tl.constexpr,
    POWER_2: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``TILES`` tiles, wherever they lie."""
    across: tl.constexpr = (K + _TILE - 1) // _TILE
    index = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    row, tile = index // across, index % across
    column = (tile * _TILE)[:, None] + tl.arange(0, _TILE)[None, :]
    inside = (index < tiles)[:, None] & (column < K)
    if K % 8 == 0:
        stride = tl.multiple_of(stride.to(tl.int64), 8)
    x = tl.load(x_ptr + (row * stride)[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    codes, scale_inv = quantized_tiles(x, amax_epsilon, LARGEST, POWER_2, TILES)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(codes_ptr + row[:, None] * K + column, codes, mask=inside)
    tl.store(scale_inv_ptr + row * row_step + tile * tile_step, scale_inv, mask=index < tiles)


def quantize_activations(
    x_MK: torch.Tensor, *, power_2_scale: bool, amax_epsilon: float, column_major: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As row_invariant.quantize_activations."""
    x_MK = rows_aligned(x_MK)
    (rows, width), across = x_MK.shape, -(-x_MK.shape[1] // TILE)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x_MK.device)
    if column_major:
        scale_inv = torch.empty(across, -(-rows // 4) * 4, dtype=torch.float32, device=x_MK.device).t()[:rows]
    else:
        scale_inv = torch.empty(rows, across, dtype=torch.float32, device=x_MK.device)
    tiles = rows * across
    if tiles:
        steps = (x_MK.stride(0), scale_inv.stride(0), scale_inv.stride(1), float(amax_epsilon))
        options = _options(K=width, LARGEST=torch.finfo(x_MK.dtype).max, POWER_2=power_2_scale, TILES=_TILES)
        _quantize[(triton.cdiv(tiles, _TILES),)](x_MK, codes, scale_inv, tiles, *steps, **options)
    return codes.view(torch.float8_e4m3fn), scale_inv
