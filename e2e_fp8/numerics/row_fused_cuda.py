"""Shared operators on CUDA that follow each other, in one kernel: bit for bit the composition, with less memory traffic.

Legend: ``P`` rows sorted by expert and padded, ``I`` width of an expert.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from e2e_fp8.numerics.formats import TILE
from e2e_fp8.numerics.row_kernels_cuda import quantized_tiles, silu_product

_ROWS = 8
"""Rows of one program; padding comes in longer runs, so most of it is skipped by whole programs."""
_STRICT: dict[str, Any] = {"enable_fp_fusion": False}
_TILE = tl.constexpr(TILE)


@triton.jit(do_not_specialize=["rows", "tile_step"])
def _silu_and_mul_quantized(
    x_ptr, expert_ptr, codes_ptr, scale_inv_ptr, rows, tile_step, amax_epsilon, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
    POWER_2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of one tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + row, mask=row < rows, other=-1)
    if tl.max(expert, axis=0) < 0:
        return
    real = expert >= 0
    column = tile * _TILE + tl.arange(0, _TILE)
    gate_ptr = x_ptr + row[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(gate_ptr, mask=real[:, None], other=0.0)
    up = tl.load(gate_ptr + WIDTH, mask=real[:, None], other=0.0)
    codes, scale_inv = quantized_tiles(silu_product(gate, up).to(tl.float32), amax_epsilon, LARGEST, POWER_2, ROWS)
    tl.store(codes_ptr + row[:, None] * WIDTH + column[None, :], codes, mask=real[:, None])
    tl.store(scale_inv_ptr + tile * tile_step + row, scale_inv, mask=real)


def silu_and_mul_quantized(
    gate_up_P2I: torch.Tensor, expert_P: torch.Tensor, *, power_2_scale: bool = False, amax_epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_activations(silu_and_mul(gate_up))`` of row_invariant for rows with an expert; others are left as memory was.

    Args:
        gate_up_P2I: contiguous bfloat16 ``[P, 2I]``, gate first, I a multiple of 128.
        expert_P: int32 ``[P]``, below 0 where a row is padding.

    Returns:
        ``(codes float8_e4m3fn [P, I], scale_inv float32 [P, I / 128])``, the latter with strides ``(1, P rounded up to 4)``.
    """
    rows, width = gate_up_P2I.shape[0], gate_up_P2I.shape[1] // 2
    assert gate_up_P2I.is_contiguous()
    assert width % TILE == 0
    codes = torch.empty(rows, width, dtype=torch.uint8, device=gate_up_P2I.device)
    padded = torch.empty(width // TILE, -(-rows // 4) * 4, dtype=torch.float32, device=gate_up_P2I.device)
    if codes.numel():
        options = {"WIDTH": width, "LARGEST": torch.finfo(gate_up_P2I.dtype).max, "POWER_2": power_2_scale, "ROWS": _ROWS, **_STRICT}
        grid = (triton.cdiv(rows, _ROWS), width // TILE)
        _silu_and_mul_quantized[grid](gate_up_P2I, expert_P, codes, padded, rows, padded.stride(0), float(amax_epsilon), **options)
    return codes.view(torch.float8_e4m3fn), padded.t()[:rows]
