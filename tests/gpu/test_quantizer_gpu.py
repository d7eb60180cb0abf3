"""The quantizer against Transformer Engine's own on a Hopper GPU, byte for byte, on inputs drawn anew at each run."""

import sys
from pathlib import Path

import pytest
import torch

from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise, quantize_with_torch
from e2e_fp8.numerics.formats import E4M3, E5M2, TILE
from e2e_fp8.numerics.linear import block_scaled_matmul
from e2e_fp8.numerics.metrics import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def fresh_seed():
    """Print the seed, so that a failure can be repeated."""
    print("torch seed", torch.seed())


def ordinary(dtype: torch.dtype) -> torch.Tensor:
    rows, columns = 384, 512
    spread = 10 ** (6 * torch.rand(rows, 1) - 3) * 10 ** (6 * torch.rand(1, columns) - 3)
    return (torch.randn(rows, columns) * spread).to(dtype)


def ragged(dtype: torch.dtype) -> torch.Tensor:
    return ordinary(dtype)[:200, :328].contiguous()


def zero_tiles(dtype: torch.dtype) -> torch.Tensor:
    x = ordinary(dtype)
    x[:128, 128:256] = 0
    x[256:, 384:] = -0.0
    return x


def not_finite(dtype: torch.dtype) -> torch.Tensor:
    x = ordinary(dtype)
    x[0, 0], x[1, 200], x[130, 3] = float("nan"), float("-nan"), float("inf")
    x[131, 300], x[300, 5], x[301, 5] = float("-inf"), float("nan"), float("inf")
    x[200, 384:] = float("nan")
    x[256:, 256:384] = float("nan")
    return x


def overflowing_scales(dtype: torch.dtype) -> torch.Tensor:
    """Tiles so small that FMAX / amax is infinite, or lies between the largest BF16 and the largest FP32 value, or just fits."""
    x = torch.zeros(256, 512)
    limit = E4M3.max_value / torch.finfo(torch.float32).max
    for tile, amax in enumerate((limit / 2, limit * 1.002, limit * 1.01, 1e-40)):
        x[:128, tile * TILE : (tile + 1) * TILE] = amax * (torch.rand(128, TILE) - 0.5)
        x[range(128), range(tile * TILE, (tile + 1) * TILE)] = amax
    limit = E5M2.max_value / torch.finfo(torch.float32).max
    for tile, amax in enumerate((limit / 2, limit * 1.002, limit * 1.01, 1e-45)):
        x[128:, tile * TILE : (tile + 1) * TILE] = amax * (torch.rand(128, TILE) - 0.5)
        x[range(128, 256), range(tile * TILE, (tile + 1) * TILE)] = amax
    return x.to(dtype)


INPUTS = (ordinary, ragged, zero_tiles, not_finite, overflowing_scales)


def te_blocks(x: torch.Tensor, fp8_format, power_2_scale: bool, amax_epsilon: float) -> list[BlockScaled]:
    """What Transformer Engine writes for ``x``: 1x128, 128x1 and 128x128 tiles, brought to the natural layouts."""
    import transformer_engine.pytorch  # noqa: F401 - makes transformer_engine_torch importable
    import transformer_engine_torch as te
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    rows, columns = x.shape
    te_dtype = {E4M3: te.DType.kFloat8E4M3, E5M2: te.DType.kFloat8E5M2}[fp8_format]
    options = {"rowwise": True, "columnwise": True, "amax_epsilon": amax_epsilon, "force_pow_2_scales": power_2_scale}
    by_row, by_tile = (Float8BlockQuantizer(te_dtype, block_scaling_dim=dim, **options)(x.cuda()) for dim in (1, 2))
    # The columnwise bytes of a 128x128 quantization are its rowwise bytes, transposed.
    assert_bitwise_equal(by_tile._columnwise_data.t().contiguous(), by_tile._rowwise_data)
    return [
        BlockScaled(codes.contiguous().view(fp8_format.dtype), scale_inv.contiguous(), tile)
        for codes, scale_inv, tile in (
            (by_row._rowwise_data, by_row._rowwise_scale_inv.t()[:rows], "1x128"),
            (by_row._columnwise_data.t(), by_row._columnwise_scale_inv[:, :columns], "128x1"),
            (by_tile._rowwise_data, by_tile._rowwise_scale_inv[:, : -(-columns // TILE)], "128x128"),
        )
    ]


@pytest.mark.parametrize("amax_epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("power_2_scale", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("fp8_format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", INPUTS, ids=lambda f: f.__name__)
def test_equals_transformer_engine(make, dtype, fp8_format, power_2_scale, amax_epsilon):
    x = make(dtype)
    options = {"power_2_scale": power_2_scale, "amax_epsilon": amax_epsilon}
    for expected in te_blocks(x, fp8_format, power_2_scale, amax_epsilon):
        for place, actual in (
            ("CPU", quantize_blockwise(x, fp8_format, expected.tile, **options)),
            ("CPU tensors", quantize_with_torch(x, fp8_format, expected.tile, **options)),
            ("GPU", quantize_blockwise(x.cuda(), fp8_format, expected.tile, **options)),
        ):
            assert_bitwise_equal(actual.scale_inv.cpu(), expected.scale_inv.cpu(), f"{place} {expected.tile} scale_inv")
            assert_bitwise_equal(
                actual.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8).cpu(), f"{place} {expected.tile} codes"
            )


@pytest.mark.parametrize("fp8_format", [E4M3, E5M2], ids=lambda f: f.name)
def test_conversion_is_the_hardwares(fp8_format):
    """All bfloat16 values and random float32 bits, NaN included; an infinity in each row makes its quant_scale 1."""
    from references.hardware_fp8_conversion import hardware_codes

    every_bf16 = torch.arange(65536).to(torch.int32) << 16
    bits = torch.cat([every_bf16, torch.randint(-(2**31), 2**31, (1 << 22,)).to(torch.int32)])
    values = bits.view(torch.float32).view(-1, TILE // 2)
    x = torch.cat([torch.full((values.shape[0], 1), float("inf")), values], 1)
    expected = hardware_codes(values, fp8_format.name)
    for place, device in (("CPU", "cpu"), ("GPU", "cuda")):
        codes = quantize_blockwise(x.to(device), fp8_format, "1x128", power_2_scale=False).codes
        assert_bitwise_equal(codes.view(torch.uint8).cpu()[:, 1:], expected, place)


@pytest.mark.parametrize("power_2_scale", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("tile", ["1x128", "128x1", "128x128"])
@pytest.mark.parametrize("fp8_format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", INPUTS, ids=lambda f: f.__name__)
def test_both_devices_write_the_same_bytes(make, dtype, fp8_format, tile, power_2_scale):
    x = make(dtype)
    host, device = (quantize_blockwise(t, fp8_format, tile, power_2_scale=power_2_scale) for t in (x, x.cuda()))
    assert_bitwise_equal(device.scale_inv, host.scale_inv, "scale_inv")
    assert_bitwise_equal(device.codes, host.codes, "codes")


def test_fprop_has_the_same_bits_on_both_devices():
    x = quantize_blockwise(ordinary(torch.bfloat16), E4M3, "1x128", power_2_scale=False)
    w = quantize_blockwise(ordinary(torch.bfloat16), E4M3, "128x128", power_2_scale=False)
    moved = [BlockScaled(b.codes.cuda(), b.scale_inv.cuda(), b.tile) for b in (x, w)]
    assert_bitwise_equal(block_scaled_matmul(*moved, torch.float32), block_scaled_matmul(x, w, torch.float32))
