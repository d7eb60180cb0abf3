"""Tile statistics against hand-made tiles and against the definitions evaluated in float64."""

import pytest
import torch

from e2e_fp8.numerics.formats import E4M3, E5M2
from e2e_fp8.numerics.tile_stats import tile_statistics


def test_hand_made_row():
    """One 1x128 tile with amax 448, so that quant_scale is 1 and every value is its own code."""
    x = torch.zeros(2, 128)
    x[0, :6] = torch.tensor([448.0, -448.0, 2.0**-7, 2.0**-9, 2.0**-10, 1.0])
    assert tile_statistics(x, E4M3, "1x128", power_2_scale=False) == {
        "saturated": 2 / 256,
        "subnormal": 2 / 6,
        "flushed": 1 / 6,
        "zero": 1 / 2,
        "out_of_e4m3_range": 1 / 2,
    }


def test_e5m2_keeps_what_e4m3_flushes():
    x = torch.zeros(1, 128)
    x[0, :2] = torch.tensor([1.0, 1e-6])
    wide = tile_statistics(x, E5M2, "1x128", power_2_scale=False)
    narrow = tile_statistics(x, E4M3, "1x128", power_2_scale=False)
    assert wide["flushed"] == 0
    assert narrow["flushed"] == 1 / 2
    assert wide["out_of_e4m3_range"] == narrow["out_of_e4m3_range"] == 1.0


@pytest.mark.parametrize("fp8_format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_definitions(fp8_format, dtype):
    x = (torch.randn(60, 300) * 10 ** (torch.rand(60, 300) * 12 - 9)).to(dtype)
    x[:20, :128] = 0
    stats = tile_statistics(x, fp8_format, "1x128", power_2_scale=False)
    flushed = subnormal = zero = out = 0
    limit = fp8_format.min_subnormal / 2
    for tile in (t for row in x.double() for t in row.split(128)):
        amax, live = tile.abs().max(), tile[tile != 0].abs()
        zero += int(amax == 0)
        if amax > 0:
            scaled = live * fp8_format.max_value / amax
            flushed += int((scaled <= limit).sum())
            # Just below the smallest normal, a value rounds up to it.
            subnormal += int(((scaled > limit) & (scaled < fp8_format.min_normal - limit)).sum())
            out += int(bool((live * 448 / amax <= 2.0**-10).any()))
    nonzero = int((x != 0).sum())
    assert stats["flushed"] == pytest.approx(flushed / nonzero, abs=2 / nonzero)
    assert stats["subnormal"] == pytest.approx(subnormal / nonzero, abs=4 / nonzero)
    assert stats["zero"] == pytest.approx(zero / 180, abs=1e-12)
    assert stats["out_of_e4m3_range"] == pytest.approx(out / 180, abs=1 / 180)


@pytest.mark.parametrize(("tile", "tiles"), [("1x128", 600), ("128x1", 600), ("128x128", 6)])
def test_ragged_tiles_count_as_tiles(tile, tiles):
    """300x200: only the last tile of either edge holds anything, so one tile in ``tiles`` is not zero."""
    x = torch.zeros(300, 200)
    x[299, 199] = 1.0
    assert tile_statistics(x, E4M3, tile, power_2_scale=True)["zero"] == pytest.approx(1 - 1 / tiles)


def test_power_of_two_scales_seldom_saturate():
    x = torch.full((4, 128), 1.0)
    assert tile_statistics(x, E4M3, "1x128", power_2_scale=False)["saturated"] == 1.0
    assert tile_statistics(x, E4M3, "1x128", power_2_scale=True)["saturated"] == 0.0


def test_empty_matrix_has_all_keys():
    assert set(tile_statistics(torch.empty(0, 128), E4M3, "1x128", power_2_scale=False).values()) == {0.0}
