"""How well a tensor fits its FP8 format, as fractions."""

import torch

from e2e_fp8.numerics.blockwise import Tile, expand_scale_inv, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3, Fp8Format


def tile_statistics(x_MK: torch.Tensor, fp8_format: Fp8Format, tile: Tile, *, power_2_scale: bool) -> dict[str, float]:
    """Fractions for one matrix.

    Returns:
        ``saturated``: codes at the largest magnitude, of all elements. ``subnormal``: nonzero elements with a subnormal code.
        ``flushed``: nonzero elements whose code is zero. ``zero``: all-zero tiles, of all tiles. ``out_of_e4m3_range``: tiles with
        a nonzero element that E4M3 at this tile's amax would flush to zero (published as the gradient tile census).
    """
    block = quantize_blockwise(x_MK, fp8_format, tile, power_2_scale=power_2_scale)
    codes = block.codes.float().abs()
    nonzero = x_MK != 0
    count = nonzero.sum().clamp_min(1)
    e4m3 = block if fp8_format is E4M3 else quantize_blockwise(x_MK, E4M3, tile, power_2_scale=power_2_scale)
    lost = torch.zeros_like(e4m3.scale_inv)
    lost_elements = (nonzero & (e4m3.codes.float() == 0)).float()
    alive = torch.zeros_like(lost)
    for counter, elements in ((lost, lost_elements), (alive, nonzero.float())):
        counter.copy_(_tile_sums(elements, counter.shape))
    return {
        "saturated": float((codes == fp8_format.max_value).float().mean()),
        "subnormal": float(((codes > 0) & (codes < fp8_format.min_normal)).sum() / count),
        "flushed": float((nonzero & (codes == 0)).sum() / count),
        "zero": float((alive == 0).float().mean()),
        "out_of_e4m3_range": float((lost > 0).float().mean()),
    }


def _tile_sums(elements: torch.Tensor, grid: torch.Size) -> torch.Tensor:
    """Sum of ``[M, K]`` over each tile of a ``[m, k]`` grid."""
    rows, columns = elements.shape
    height, width = -(-rows // grid[0]) if grid[0] != rows else 1, -(-columns // grid[1]) if grid[1] != columns else 1
    height, width = (128 if height > 1 else 1), (128 if width > 1 else 1)
    padded = torch.nn.functional.pad(elements, (0, grid[1] * width - columns, 0, grid[0] * height - rows))
    return padded.view(grid[0], height, grid[1], width).sum(dim=(1, 3))


__all__ = ["expand_scale_inv", "tile_statistics"]
