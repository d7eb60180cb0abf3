"""How well a tensor fits its FP8 format, as fractions."""

import torch
import torch.nn.functional as F

from e2e_fp8.numerics.blockwise import TILE_SHAPES, Tile, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3, Fp8Format


def tile_statistics(
    x_MK: torch.Tensor, fp8_format: Fp8Format, tile: Tile, *, power_2_scale: bool, amax_epsilon: float = 0.0
) -> dict[str, float]:
    """Fractions in [0, 1] for one finite matrix ``[M, K]``, float32 or bfloat16; all 0 when it is empty.

    Returns:
        ``saturated``: codes at the largest magnitude, of all elements (each tile's amax is one under FP32 scales).
        ``subnormal``: nonzero elements with a nonzero code below the smallest normal (2**-6 for E4M3, 2**-14 for E5M2).
        ``flushed``: nonzero elements whose code is zero (at most 2**-10 after scaling for E4M3, 2**-17 for E5M2).
        ``zero``: all-zero tiles, of all tiles.
        ``out_of_e4m3_range``: tiles with a nonzero element that E4M3 at this tile's amax would flush, of all tiles.
    """
    if not x_MK.numel():
        return dict.fromkeys(("saturated", "subnormal", "flushed", "zero", "out_of_e4m3_range"), 0.0)
    block = quantize_blockwise(x_MK, fp8_format, tile, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    e4m3 = block
    if fp8_format is not E4M3:
        e4m3 = quantize_blockwise(x_MK, E4M3, tile, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    # Magnitudes order as their codes, so bytes are compared and nothing is decoded.
    code = block.codes.view(torch.uint8) & 0x7F
    largest = torch.tensor(fp8_format.max_value).to(fp8_format.dtype).view(torch.uint8)
    smallest_normal = torch.tensor(fp8_format.min_normal).to(fp8_format.dtype).view(torch.uint8)
    nonzero = x_MK.detach() != 0
    count = max(int(nonzero.sum()), 1)
    lost = nonzero & ((e4m3.codes.view(torch.uint8) & 0x7F) == 0)
    return {
        "saturated": float((code == largest.to(code.device)).sum()) / code.numel(),
        "subnormal": float(((code > 0) & (code < smallest_normal.to(code.device))).sum()) / count,
        "flushed": float((nonzero & (code == 0)).sum()) / count,
        "zero": 1.0 - float(_any_in_tile(nonzero, tile).double().mean()),
        "out_of_e4m3_range": float(_any_in_tile(lost, tile).double().mean()),
    }


def _any_in_tile(elements_MK: torch.Tensor, tile: Tile) -> torch.Tensor:
    """bool per tile: whether any element of it is true; missing elements of ragged tiles are false."""
    (rows, columns), (height, width) = elements_MK.shape, TILE_SHAPES[tile]
    padded = F.pad(elements_MK, (0, -columns % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).any(3).any(1)
