"""Block quantization, code for code and scale for scale what Transformer Engine's Hopper kernels write.

    amax = max |x| over the tile in FP32, NaN ignored
    quant_scale = FMAX / amax  (round to nearest); 1 where amax is 0 or inf; the input dtype's largest finite value on overflow
    power of two: the mantissa of quant_scale is cleared
    scale_inv = 1 / quant_scale;  code = round-to-nearest-even(clamp(x * quant_scale, -FMAX, FMAX))

Legend: M rows, K columns; tile counts are ceil(./128).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from e2e_fp8.numerics.formats import TILE, Fp8Format, fp8_format_of

Tile = Literal["1x128", "128x1", "128x128"]
_EDGES: dict[str, tuple[int, int]] = {"1x128": (1, TILE), "128x1": (TILE, 1), "128x128": (TILE, TILE)}


@dataclass(frozen=True)
class BlockScaled:
    """Codes with their dequantization multipliers."""

    codes: torch.Tensor
    """FP8 ``[M, K]``."""
    scale_inv: torch.Tensor
    """float32, one per tile: ``[M, ceil(K/128)]``, ``[ceil(M/128), K]`` or ``[ceil(M/128), ceil(K/128)]``."""
    tile: Tile


def quant_scale_of(amax: torch.Tensor, fp8_format: Fp8Format, input_dtype: torch.dtype, power_2_scale: bool, amax_epsilon: float) -> torch.Tensor:
    """float32 multiplier per tile from its float32 ``amax``."""
    amax = amax.clamp_min(amax_epsilon) if amax_epsilon else amax
    quant_scale = torch.full_like(amax, fp8_format.max_value) / amax
    quant_scale = quant_scale.clamp_max(torch.finfo(input_dtype).max)
    quant_scale = torch.where((amax == 0) | torch.isinf(amax), torch.ones_like(amax), quant_scale)
    if power_2_scale:
        quant_scale = (quant_scale.view(torch.int32) & -0x800000).view(torch.float32)
    return quant_scale


def quantize_blockwise(
    x_MK: torch.Tensor, fp8_format: Fp8Format | str, tile: Tile, *, power_2_scale: bool, amax_epsilon: float = 0.0
) -> BlockScaled:
    """Quantize ``[M, K]`` float32 or bfloat16.

    Raises:
        ValueError: not two-dimensional, or neither float32 nor bfloat16.
    """
    fp8_format = fp8_format_of(fp8_format)
    if x_MK.dim() != 2 or x_MK.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quantize_blockwise takes a float32 or bfloat16 matrix, got {x_MK.dtype} {tuple(x_MK.shape)}")
    rows, columns = x_MK.shape
    tile_rows, tile_columns = _EDGES[tile]
    pad_rows, pad_columns = -rows % tile_rows, -columns % tile_columns
    padded = F.pad(x_MK, (0, pad_columns, 0, pad_rows)) if pad_rows or pad_columns else x_MK
    grid = padded.float().reshape((rows + pad_rows) // tile_rows, tile_rows, (columns + pad_columns) // tile_columns, tile_columns)
    amax = grid.abs().amax(dim=(1, 3)) if grid.numel() else grid.new_zeros(grid.shape[0], grid.shape[2])
    if bool(torch.isnan(amax).any()):
        amax = grid.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=(1, 3))
    quant_scale = quant_scale_of(amax, fp8_format, x_MK.dtype, power_2_scale, amax_epsilon)
    scaled = grid * quant_scale[:, None, :, None]
    codes = scaled.clamp_(-fp8_format.max_value, fp8_format.max_value).to(fp8_format.dtype).view(rows + pad_rows, columns + pad_columns)
    if pad_rows or pad_columns:
        codes = codes.view(torch.uint8)[:rows, :columns].contiguous().view(fp8_format.dtype)
    return BlockScaled(codes, 1.0 / quant_scale, tile)


def expand_scale_inv(block: BlockScaled) -> torch.Tensor:
    """float32 ``[M, K]``: each element's own multiplier."""
    rows, columns = block.codes.shape
    tile_rows, tile_columns = _EDGES[block.tile]
    wide = block.scale_inv.repeat_interleave(tile_rows, 0) if tile_rows > 1 else block.scale_inv
    wide = wide.repeat_interleave(tile_columns, 1) if tile_columns > 1 else wide
    return wide[:rows, :columns]


def dequantize_blockwise(block: BlockScaled) -> torch.Tensor:
    """float32 ``[M, K]``: codes times their multipliers, rounded once."""
    return block.codes.float() * expand_scale_inv(block)
