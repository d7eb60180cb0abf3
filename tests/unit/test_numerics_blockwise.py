"""Block quantizer: recorded Transformer Engine bytes, an independent reference, and properties."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, expand_scale_inv, quantize_blockwise, quantize_with_torch
from e2e_fp8.numerics.formats import E4M3, E5M2, fp8_format_of
from e2e_fp8.numerics.metrics import assert_bitwise_equal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import blockwise_reference as reference

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "te_blockwise_quantizer_h200.safetensors")
FORMATS = (E4M3, E5M2)
TILES = ("1x128", "128x1", "128x128")
DTYPES = (torch.float32, torch.bfloat16)


def every(function):
    for name, values in (("fp8_format", FORMATS), ("tile", TILES), ("power_2_scale", (False, True))):
        function = pytest.mark.parametrize(name, values, ids=lambda v: getattr(v, "name", str(v)))(function)
    return function


def assert_same(actual: BlockScaled, expected: BlockScaled) -> None:
    assert_bitwise_equal(actual.scale_inv, expected.scale_inv, "scale_inv")
    assert_bitwise_equal(actual.codes, expected.codes, "codes")


def by_reference(x: torch.Tensor, fp8_format, tile, power_2_scale: bool, amax_epsilon: float = 0.0) -> BlockScaled:
    codes, scale_inv = reference.quantize(x.float().numpy(), fp8_format.name, tile, power_2_scale, amax_epsilon, torch.finfo(x.dtype).max)
    return BlockScaled(torch.from_numpy(codes).view(fp8_format.dtype), torch.from_numpy(scale_inv), tile)


def many_scales(rows: int, columns: int, dtype: torch.dtype, decades: float = 6.0) -> torch.Tensor:
    """Every tile of every kind gets a scale of its own, so that a wrong scale cannot pass."""
    rough = torch.randn(rows, columns) * 10 ** (decades * (torch.rand(rows, 1) - 0.5)) * 10 ** (decades * (torch.rand(1, columns) - 0.5))
    return rough.to(dtype)


def with_specials(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Zero, NaN, infinite, subnormal and overflowing tiles beside ordinary ones; needs 384 rows and 200 columns."""
    x = many_scales(rows, columns, dtype)
    x[:128, :128] = 0
    x[128, 0], x[129, 5] = float("nan"), float("-nan")
    x[130, 3], x[131, 140] = float("inf"), float("-inf")
    x[132, :128] = float("nan")
    x[256:, :128] *= 1e-38 / x[256:, :128].abs().amax()
    x[260] = -0.0
    x[261, 128:] = 1e-45 if dtype == torch.float32 else 1e-40
    return x


@every
@pytest.mark.parametrize("name", ["zero_tile_bf16", "ragged_bf16", "fp32"])
def test_equals_recorded_transformer_engine(name, fp8_format, tile, power_2_scale):
    key = f"{name}.{fp8_format.name}.{'pow2' if power_2_scale else 'fp32'}.{tile}"
    block = quantize_blockwise(GOLDEN[f"{name}.input"], fp8_format, tile, power_2_scale=power_2_scale)
    assert_bitwise_equal(block.codes.view(torch.uint8), GOLDEN[f"{key}.codes"], f"{key}.codes")
    assert_bitwise_equal(block.scale_inv, GOLDEN[f"{key}.scale_inv"], f"{key}.scale_inv")


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(384, 256), (400, 200), (1, 1), (3, 130), (129, 2)])
def test_equals_reference(shape, dtype, fp8_format, tile, power_2_scale):
    x = with_specials(*shape, dtype) if shape[0] >= 384 else many_scales(*shape, dtype)
    expected = by_reference(x, fp8_format, tile, power_2_scale)
    assert_same(quantize_blockwise(x, fp8_format, tile, power_2_scale=power_2_scale), expected)
    assert_same(quantize_with_torch(x, fp8_format, tile, power_2_scale=power_2_scale), expected)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    fp8_format=st.sampled_from(FORMATS),
    tile=st.sampled_from(TILES),
    power_2_scale=st.booleans(),
    amax_epsilon=st.sampled_from([0.0, 1e-12, 1e-3]),
    spread=st.integers(0, 31),
)
@settings(max_examples=60, deadline=None)
def test_any_bit_pattern(seed, rows, columns, dtype, fp8_format, tile, power_2_scale, amax_epsilon, spread):
    """Random bits, NaN and infinity included; ``spread`` narrows them to neighbouring magnitudes so that finite tiles occur."""
    bits = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, columns), dtype=np.int64) >> spread
    x = torch.from_numpy((bits + (0x3F800000 if spread > 3 else 0)).astype(np.int32)).view(torch.float32).to(dtype)
    expected = by_reference(x, fp8_format, tile, power_2_scale, amax_epsilon)
    options = {"power_2_scale": power_2_scale, "amax_epsilon": amax_epsilon}
    assert_same(quantize_blockwise(x, fp8_format, tile, **options), expected)
    assert_same(quantize_with_torch(x, fp8_format, tile, **options), expected)


@pytest.mark.parametrize("fp8_format", FORMATS, ids=lambda f: f.name)
def test_every_bfloat16_value_is_rounded_right(fp8_format):
    """An infinity in each row makes its quant_scale 1, so the codes are plain conversions of all 65536 bit patterns."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 64)
    x = torch.cat([torch.full((values.shape[0], 1), float("inf"), dtype=torch.bfloat16), values], 1)
    codes = quantize_blockwise(x, fp8_format, "1x128", power_2_scale=False).codes.view(torch.uint8)[:, 1:]
    expected = torch.from_numpy(reference.encode(values.float().numpy(), fp8_format.name))
    assert_bitwise_equal(codes, expected)


@every
def test_all_zero_is_scale_one(fp8_format, tile, power_2_scale):
    block = quantize_blockwise(torch.zeros(200, 200), fp8_format, tile, power_2_scale=power_2_scale)
    assert bool((block.scale_inv == 1).all())
    assert bool((block.codes.view(torch.uint8) == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflowing_scale_takes_the_input_dtypes_largest_value(dtype):
    x = torch.full((1, 128), 1e-39).to(dtype)
    block = quantize_blockwise(x, E4M3, "1x128", power_2_scale=False)
    assert float(block.scale_inv) == float(1 / torch.tensor(torch.finfo(dtype).max, dtype=torch.float32)) > 0


@pytest.mark.parametrize("quantize", [quantize_blockwise, quantize_with_torch])
def test_only_an_infinite_scale_is_replaced(quantize):
    """A quotient above the largest bfloat16 value but finite stays, also for bfloat16 input."""
    largest = torch.finfo(torch.bfloat16).max
    epsilon = torch.tensor(448 / (largest * 1.002)).item()
    block = quantize(torch.zeros(1, 128, dtype=torch.bfloat16), E4M3, "1x128", power_2_scale=False, amax_epsilon=epsilon)
    expected = by_reference(torch.zeros(1, 128, dtype=torch.bfloat16), E4M3, "1x128", False, epsilon)
    assert_same(block, expected)
    assert 0 < float(block.scale_inv) < 1 / largest


def test_amax_epsilon_is_the_smallest_amax():
    block = quantize_blockwise(torch.zeros(1, 128), E4M3, "1x128", power_2_scale=True, amax_epsilon=448 / 1024)
    assert float(block.scale_inv) == 1 / 1024


@every
def test_power_of_two_scales_are_powers_and_never_saturate_more(fp8_format, tile, power_2_scale):
    block = quantize_blockwise(many_scales(256, 256, torch.float32), fp8_format, tile, power_2_scale=power_2_scale)
    exact_powers = bool((torch.frexp(block.scale_inv)[0] == 0.5).all())
    assert exact_powers is power_2_scale
    assert bool(block.codes.float().isfinite().all())


@every
def test_transpose_exchanges_row_and_column_tiles(fp8_format, tile, power_2_scale):
    x = many_scales(200, 330, torch.bfloat16)
    other = {"1x128": "128x1", "128x1": "1x128", "128x128": "128x128"}[tile]
    block = quantize_blockwise(x, fp8_format, tile, power_2_scale=power_2_scale)
    # A transposed view, so strided input is covered as well.
    turned = quantize_blockwise(x.t(), fp8_format, other, power_2_scale=power_2_scale)
    assert_bitwise_equal(turned.codes.view(torch.uint8).t().contiguous(), block.codes.view(torch.uint8))
    assert_bitwise_equal(turned.scale_inv.t().contiguous(), block.scale_inv)


@every
def test_dequantized_error_is_within_half_a_step(fp8_format, tile, power_2_scale):
    x = many_scales(260, 260, torch.float32, decades=3)
    block = quantize_blockwise(x, fp8_format, tile, power_2_scale=power_2_scale)
    error = (dequantize_blockwise(block).double() - x.double()).abs()
    step = expand_scale_inv(block).double() * fp8_format.min_subnormal
    relative = x.double().abs() * 2.0 ** -(fp8_format.mantissa_bits + 1)
    assert bool((error <= torch.maximum(step / 2, relative) * (1 + 1e-6)).all())


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
@pytest.mark.parametrize("tile", TILES)
def test_empty(shape, tile):
    block = quantize_blockwise(torch.empty(shape, dtype=torch.bfloat16), "e4m3", tile, power_2_scale=False)
    assert block.codes.shape == shape
    assert block.codes.dtype == torch.float8_e4m3fn
    assert_same(quantize_with_torch(torch.empty(shape, dtype=torch.bfloat16), E4M3, tile, power_2_scale=False), block)


def test_input_is_neither_changed_nor_aliased():
    x = torch.randn(130, 130, requires_grad=True)
    before = x.detach().clone()
    block = quantize_blockwise(x, E4M3, "128x128", power_2_scale=False)
    block.codes.view(torch.uint8).zero_()
    assert torch.equal(x, before)
    assert not block.scale_inv.requires_grad


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float16), torch.zeros(2, 2, 2)])
def test_wrong_input_is_refused(bad):
    with pytest.raises(ValueError, match="float32 or bfloat16 matrix"):
        quantize_blockwise(bad, E4M3, "1x128", power_2_scale=False)


def test_unknown_tile_and_format_are_refused():
    with pytest.raises(ValueError, match="64x64"):
        quantize_blockwise(torch.zeros(2, 2), E4M3, "64x64", power_2_scale=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="e3m4"):
        fp8_format_of("e3m4")


@pytest.mark.parametrize("fp8_format", FORMATS, ids=lambda f: f.name)
def test_formats_agree_with_torch_and_the_reference_table(fp8_format):
    info, table = torch.finfo(fp8_format.dtype), reference.magnitudes(fp8_format.name)
    assert fp8_format.max_value == info.max == table[-1]
    assert fp8_format.min_normal == info.smallest_normal == table[1 << fp8_format.mantissa_bits]
    assert fp8_format.min_subnormal == table[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_speed(dtype):
    """Three times the budget of 60 ms for a 4096x4096 weight and of 0.3 ms for a 256x256 activation."""
    for shape, tile, budget in (((4096, 4096), "128x128", 0.180), ((256, 256), "1x128", 0.0009)):
        x = torch.randn(shape).to(dtype)
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            quantize_blockwise(x, E4M3, tile, power_2_scale=False)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < budget, f"{shape} {tile}: {min(seconds) * 1e3:.2f} ms"
