"""The FP8 linear: exact bits of fprop, row invariance, gradients against float64 and against BF16 autograd."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from e2e_fp8.numerics.blockwise import BlockScaled, dequantize_blockwise, quantize_blockwise
from e2e_fp8.numerics.linear import Fp8LinearFunction, block_scaled_matmul, fp8_dgrad, fp8_wgrad
from e2e_fp8.numerics.metrics import assert_bitwise_equal, calc_diff, sqnr_db

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references import blockwise_reference as reference
from tolerances import LINEAR_DIFF, LINEAR_WORST, QUANTIZATION_SQNR_DB


@dataclass(frozen=True)
class Recipe:
    forward_format: str = "e4m3"
    backward_format: str = "e5m2"
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


RECIPES = [Recipe(), Recipe(backward_format="e4m3"), Recipe(power_2_scale=True)]
SHAPES = [(7, 256, 128), (130, 128, 384), (300, 200, 72), (1, 1, 1), (128, 130, 257)]


def operands(M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and dy with scales that differ from tile to tile."""

    def rough(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * 10 ** (torch.rand(rows, 1) * 2) * 10 ** (torch.rand(1, columns) * 2)).to(dtype)

    return rough(M, K), rough(N, K) * 0.02, rough(M, N) * 1e-4


def quantized(t: torch.Tensor, name: str, tile, recipe: Recipe) -> BlockScaled:
    return quantize_blockwise(t, name, tile, power_2_scale=recipe.power_2_scale)


def values64(t: torch.Tensor, name: str, tile, recipe: Recipe) -> torch.Tensor:
    block = quantized(t, name, tile, recipe)
    return dequantize_blockwise(BlockScaled(block.codes, block.scale_inv.double(), tile))


@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("shape", [(5, 130, 300), (17, 128, 256), (1, 1, 1), (2, 257, 129)])
def test_fprop_has_the_references_bits(shape, power_2_scale):
    x, w, _ = operands(*shape)
    recipe = Recipe(power_2_scale=power_2_scale)
    xq, wq = quantized(x, "e4m3", "1x128", recipe), quantized(w, "e4m3", "128x128", recipe)
    expected = reference.matmul(
        xq.codes.view(torch.uint8).numpy(), xq.scale_inv.numpy(), wq.codes.view(torch.uint8).numpy(), wq.scale_inv.numpy()
    )
    assert_bitwise_equal(block_scaled_matmul(xq, wq, torch.float32), torch.from_numpy(expected))
    assert_bitwise_equal(block_scaled_matmul(xq, wq, torch.bfloat16), torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, w, _ = operands(1100, 384, 512)
        xq, wq = quantized(x, "e4m3", "1x128", Recipe()), quantized(w, "e4m3", "128x128", Recipe())
        whole = block_scaled_matmul(xq, wq, torch.float32)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64, 127, 513):
            for first in (0, 1100 - rows):
                part = BlockScaled(xq.codes[first : first + rows], xq.scale_inv[first : first + rows], "1x128")
                assert_bitwise_equal(block_scaled_matmul(part, wq, torch.float32), whole[first : first + rows], f"{rows} rows at {first}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_float64_autograd_of_the_quantized_operands(dtype, shape, recipe):
    """Each product is taken in float64 on dequantized operands; autograd supplies which operand meets which."""
    x, w, dy = operands(*shape, dtype)
    wq = quantized(w, "e4m3", "128x128", recipe)
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = Fp8LinearFunction.apply(x_leaf, w_leaf, wq, recipe)
    y.backward(dy)

    row_x, column_x = (values64(x, "e4m3", tile, recipe).requires_grad_() for tile in ("1x128", "128x1"))
    weight = values64(w, "e4m3", "128x128", recipe).requires_grad_()
    expected_y = torch.nn.functional.linear(row_x, weight)
    expected_y.backward(values64(dy, recipe.backward_format, "1x128", recipe))
    expected_dx, weight.grad = row_x.grad, None
    torch.nn.functional.linear(column_x, weight).backward(values64(dy, recipe.backward_format, "128x1", recipe))

    # FP32 sums of up to 300 terms, then one rounding to the output dtype: a relative error e gives a difference of e**2 / 2.
    for name, actual, expected in (("y", y, expected_y), ("dx", x_leaf.grad, expected_dx), ("dw", w_leaf.grad, weight.grad)):
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        assert calc_diff(actual, expected) < LINEAR_DIFF[dtype], f"{name}: {calc_diff(actual, expected):.2e}"
        worst = float(((actual.detach().double() - expected.detach()).abs() / expected.detach().abs().amax()).amax())
        assert worst < LINEAR_WORST[dtype], f"{name}: {worst:.2e}"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_close_to_bfloat16_autograd(recipe):
    """Independent of the quantizer: plain autograd on the unquantized operands, up to quantization noise."""
    x, w = torch.randn(256, 384), torch.randn(256, 384) * 0.02
    dy = torch.randn(256, 256)
    ours = [t.bfloat16().requires_grad_() for t in (x, w)]
    plain = [t.bfloat16().float().requires_grad_() for t in (x, w)]
    y = Fp8LinearFunction.apply(*ours, quantized(ours[1].detach(), "e4m3", "128x128", recipe), recipe)
    y.backward(dy.bfloat16())
    expected = torch.nn.functional.linear(*plain)
    expected.backward(dy.bfloat16().float())
    gradient_floor = QUANTIZATION_SQNR_DB[recipe.backward_format]
    assert sqnr_db(expected, y) > QUANTIZATION_SQNR_DB["e4m3"]
    assert sqnr_db(plain[0].grad, ours[0].grad) > gradient_floor
    assert sqnr_db(plain[1].grad, ours[1].grad) > gradient_floor


def test_forward_uses_the_codes_and_not_the_parameter():
    x, w, _ = operands(8, 128, 128)
    wq = quantized(w, "e4m3", "128x128", Recipe())
    y = Fp8LinearFunction.apply(x, torch.zeros_like(w), wq, Recipe())
    assert_bitwise_equal(y, block_scaled_matmul(quantized(x, "e4m3", "1x128", Recipe()), wq, torch.bfloat16))
    assert bool((y != 0).any())


def test_zero_rows():
    """An expert without tokens: empty output, empty dx, zero (not missing) dw."""
    w = torch.randn(128, 256).bfloat16().requires_grad_()
    x = torch.empty(0, 256, dtype=torch.bfloat16, requires_grad=True)
    y = Fp8LinearFunction.apply(x, w, quantized(w.detach(), "e4m3", "128x128", Recipe()), Recipe())
    y.sum().backward()
    assert y.shape == (0, 128)
    assert x.grad.shape == (0, 256)
    assert w.grad.shape == w.shape
    assert not bool(w.grad.any())


def test_gradients_are_repeatable_and_only_the_wanted_ones_are_made():
    x, w, dy = operands(200, 256, 256)
    wq = quantized(w, "e4m3", "128x128", Recipe())
    assert_bitwise_equal(fp8_dgrad(dy, wq, Recipe()), fp8_dgrad(dy, wq, Recipe()))
    assert_bitwise_equal(fp8_wgrad(dy, x, Recipe()), fp8_wgrad(dy, x, Recipe()))
    frozen = w.clone()
    x_leaf = x.clone().requires_grad_()
    Fp8LinearFunction.apply(x_leaf, frozen, wq, Recipe()).backward(dy)
    assert x_leaf.grad is not None
    assert frozen.grad is None


def test_wgrad_tiles_restart_every_128_tokens():
    """Scaling the tokens of one block changes that block's contribution alone, exactly, by a power of two."""
    x, _, dy = operands(256, 128, 128)
    first, second = fp8_wgrad(dy[:128], x[:128], Recipe()), fp8_wgrad(dy[128:], x[128:], Recipe())
    scaled = torch.cat([dy[:128], dy[128:] * 64])
    assert_bitwise_equal(fp8_wgrad(scaled, x, Recipe()), first + second * 64)


def test_mismatched_operands_are_refused():
    x, w, _ = operands(4, 128, 256)
    xq, wq = quantized(x, "e4m3", "1x128", Recipe()), quantized(w, "e4m3", "128x128", Recipe())
    with pytest.raises(ValueError, match="128x1"):
        block_scaled_matmul(quantized(x, "e4m3", "128x1", Recipe()), wq, torch.float32)
    with pytest.raises(ValueError, match="equal K"):
        block_scaled_matmul(xq, quantized(w[:, :128], "e4m3", "128x128", Recipe()), torch.float32)


def test_non_finite_input_reaches_the_output():
    """A NaN in x must not be hidden by quantization: its whole row of y is NaN, other rows are finite."""
    x, w, _ = operands(3, 128, 128)
    x[1, 5] = float("nan")
    y = Fp8LinearFunction.apply(x, w, quantized(w, "e4m3", "128x128", Recipe()), Recipe())
    assert bool(y[1].isnan().all())
    assert bool(y[[0, 2]].isfinite().all())
