"""Block quantization, code for code and scale for scale what Transformer Engine's Hopper kernels write.

    amax = max |x| over the tile in FP32, NaN ignored
    quant_scale = FMAX / amax  (round to nearest); 1 where amax is 0 or inf; the input dtype's largest value in place of an inf
    power of two: the mantissa of quant_scale is cleared
    scale_inv = 1 / quant_scale;  code = round-to-nearest-even(clamp(x * quant_scale, -FMAX, FMAX)); NaN has one code, 0x7F

Legend: M rows, K columns; tile counts are ceil(./128).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from e2e_fp8.numerics.formats import TILE, Fp8Format, fp8_format_of

Tile = Literal["1x128", "128x1", "128x128"]
TILE_SHAPES: dict[str, tuple[int, int]] = {"1x128": (1, TILE), "128x1": (TILE, 1), "128x128": (TILE, TILE)}
"""(rows, columns) of one tile."""


@dataclass(frozen=True)
class BlockScaled:
    """Codes with their dequantization multipliers."""

    codes: torch.Tensor
    """FP8 ``[M, K]``."""
    scale_inv: torch.Tensor
    """float32, one per tile: ``[M, ceil(K/128)]``, ``[ceil(M/128), K]`` or ``[ceil(M/128), ceil(K/128)]``."""
    tile: Tile


def quantize_blockwise(
    x_MK: torch.Tensor, fp8_format: Fp8Format | str, tile: Tile, *, power_2_scale: bool, amax_epsilon: float = 0.0
) -> BlockScaled:
    """Quantize ``[M, K]`` float32 or bfloat16; any M and K, also zero. CPU and CUDA give the same bytes.

    ``amax_epsilon`` is the smallest tile amax before the division, in the units of ``x``.

    Raises:
        ValueError: not two-dimensional, neither float32 nor bfloat16, or an unknown format or tile.
    """
    fp8_format = fp8_format_of(fp8_format)
    if tile not in TILE_SHAPES:
        raise ValueError(f"unknown tile {tile!r}; known: {', '.join(TILE_SHAPES)}")
    if x_MK.dim() != 2 or x_MK.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quantize_blockwise takes a float32 or bfloat16 matrix, got {x_MK.dtype} {tuple(x_MK.shape)}")
    x_MK = x_MK.detach().contiguous()
    if x_MK.device.type == "cpu":
        from e2e_fp8.numerics import cpu_kernels

        return BlockScaled(*cpu_kernels.quantize(x_MK, fp8_format, TILE_SHAPES[tile], power_2_scale, amax_epsilon), tile)
    return quantize_with_torch(x_MK, fp8_format, tile, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)


def quantize_with_torch(
    x_MK: torch.Tensor, fp8_format: Fp8Format, tile: Tile, *, power_2_scale: bool, amax_epsilon: float = 0.0
) -> BlockScaled:
    """``quantize_blockwise`` in tensor operations, on any device; on a CPU some ten times slower than the compiled loops."""
    rows, columns = x_MK.shape
    height, width = TILE_SHAPES[tile]
    tile_rows, tile_columns = -(-rows // height), -(-columns // width)
    padded = F.pad(x_MK, (0, tile_columns * width - columns, 0, tile_rows * height - rows))
    grid = padded.float().view(tile_rows, height, tile_columns, width)
    magnitude = torch.where(grid.isnan(), 0.0, grid.abs())
    amax = magnitude.amax(dim=(1, 3)) if grid.numel() else magnitude.sum(dim=(1, 3))
    quant_scale = _quant_scale(amax, fp8_format, x_MK.dtype, power_2_scale, amax_epsilon)
    scaled = (grid * quant_scale[:, None, :, None]).view(tile_rows * height, tile_columns * width)[:rows, :columns]
    codes = scaled.clamp(-fp8_format.max_value, fp8_format.max_value).to(fp8_format.dtype).view(torch.uint8)
    codes = codes.masked_fill(scaled.isnan(), fp8_format.nan_code).contiguous()
    return BlockScaled(codes.view(fp8_format.dtype), 1.0 / quant_scale, tile)


def _quant_scale(
    amax: torch.Tensor, fp8_format: Fp8Format, input_dtype: torch.dtype, power_2_scale: bool, amax_epsilon: float
) -> torch.Tensor:
    """float32 multiplier of each tile from its float32 ``amax``, which holds no NaN."""
    amax = amax.clamp_min(amax_epsilon)
    quant_scale = torch.full_like(amax, fp8_format.max_value) / amax
    quant_scale = torch.where(quant_scale.isinf(), torch.finfo(input_dtype).max, quant_scale)
    quant_scale = torch.where((amax == 0) | amax.isinf(), 1.0, quant_scale)
    if power_2_scale:
        quant_scale = (quant_scale.view(torch.int32) & -0x800000).view(torch.float32)
    return quant_scale


def expand_scale_inv(block: BlockScaled) -> torch.Tensor:
    """float32 ``[M, K]``: each element's own multiplier."""
    rows, columns = block.codes.shape
    height, width = TILE_SHAPES[block.tile]
    wide = block.scale_inv.repeat_interleave(height, 0) if height > 1 else block.scale_inv
    wide = wide.repeat_interleave(width, 1) if width > 1 else wide
    return wide[:rows, :columns]


def dequantize_blockwise(block: BlockScaled) -> torch.Tensor:
    """float32 ``[M, K]``: codes times their multipliers, rounded once."""
    return block.codes.float() * expand_scale_inv(block)
