"""Reference block-FP8 linear: the three products of a training step.

    fprop  y  = x(E4M3, 1x128) @ w(E4M3, 128x128).T
    dgrad  dx = dy(E5M2 or E4M3, 1x128) @ w(the same codes)
    wgrad  dw = dy(E5M2 or E4M3, 128x1).T @ x(E4M3, 128x1)

The summed axis S is cut into blocks of 128. A block's sum of products of codes is multiplied by the float32 product of its
two scale_inv, and blocks are added in order in float32, as the Hopper kernels do.

In fprop a block's sum is formed in float64 and rounded once to float32. E4M3 codes are multiples of 2**-9 up to 448, so
128 products sum to at most 43 significant bits: the float64 sum is exact in any order. A row of y therefore has the same
bits for any batch size, thread count and BLAS, which float32 sums do not give (MKL takes another path below 10 rows).
Gradients sum in float32. Legend: M tokens, N out features, K in features.
"""

from typing import Any, Protocol

import torch

from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3, TILE, Fp8Format, fp8_format_of

_ROWS_IN_CACHE = 512


class Recipe(Protocol):
    """How a linear quantizes; ``QuantizationPlan`` is one."""

    @property
    def forward_format(self) -> str: ...
    @property
    def backward_format(self) -> str: ...
    @property
    def power_2_scale(self) -> bool: ...  # of activations and gradients; a weight comes quantized
    @property
    def amax_epsilon(self) -> float: ...


def block_scaled_matmul(x: BlockScaled, w: BlockScaled, out_dtype: torch.dtype) -> torch.Tensor:
    """``x [M, K]`` (1x128 tiles) times ``w [N, K]`` (128x128 tiles) transposed -> ``[M, N]``; any M, also 0.

    Raises:
        ValueError: other tiles, or differing K.
    """
    if x.tile != "1x128" or w.tile != "128x128" or x.codes.shape[1] != w.codes.shape[1]:
        raise ValueError(
            f"block_scaled_matmul multiplies 1x128 by 128x128 tiles of equal K, got {x.tile} {tuple(x.codes.shape)} "
            f"and {w.tile} {tuple(w.codes.shape)}"
        )
    exact = x.codes.dtype == E4M3.dtype and w.codes.dtype == E4M3.dtype
    sum_dtype = torch.float64 if exact else torch.float32
    return _block_sums(x.codes, x.scale_inv, w.codes.t(), w.scale_inv.t(), sum_dtype).to(out_dtype)


def _block_sums(
    left_MS: torch.Tensor, left_scale_inv_Ms: torch.Tensor, right_SN: torch.Tensor, right_scale_inv_sN: torch.Tensor, sum_dtype: torch.dtype
) -> torch.Tensor:
    """float32 ``[M, N]``: sum over blocks s of ``float32(left_s @ right_s) * (left_scale_inv_s * right_scale_inv_s)``.

    Codes may be transposed views. ``right_scale_inv_sN`` has one factor per column, or one per 128 columns.
    """
    rows, columns = left_MS.shape[0], right_SN.shape[1]
    total = torch.zeros(rows, columns, dtype=torch.float32, device=left_MS.device)
    if right_scale_inv_sN.shape[1] != columns:
        right_scale_inv_sN = right_scale_inv_sN.repeat_interleave(TILE, 1)[:, :columns]
    partial = torch.empty(min(rows, _ROWS_IN_CACHE), columns, dtype=sum_dtype, device=total.device)
    for block in range(-(-left_MS.shape[1] // TILE) if total.numel() else 0):
        summed = slice(block * TILE, (block + 1) * TILE)
        right = _decode(right_SN[summed], sum_dtype)
        for start in range(0, rows, _ROWS_IN_CACHE):
            chunk = slice(start, min(start + _ROWS_IN_CACHE, rows))
            products = torch.mm(_decode(left_MS[chunk, summed], sum_dtype), right, out=partial[: chunk.stop - start])
            _add_scaled(total[chunk], products, left_scale_inv_Ms[chunk, block], right_scale_inv_sN[block])
    return total


def _decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Exact values of FP8 ``codes``; strides are kept in kind, a transposed view stays one."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    from e2e_fp8.numerics import cpu_kernels

    transposed = codes.stride(0) < codes.stride(1)
    return cpu_kernels.decode(codes.t(), dtype).t() if transposed else cpu_kernels.decode(codes, dtype)


def _add_scaled(total: torch.Tensor, partial: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += float32(partial) * (left[:, None] * right)``; the CPU loop and the tensor operations round alike."""
    if total.device.type == "cpu":
        from e2e_fp8.numerics import cpu_kernels

        cpu_kernels.add_scaled(total, partial, left, right)
    else:
        total += partial.float() * (left[:, None] * right)


class Fp8LinearFunction(torch.autograd.Function):
    """``y = x @ w.T`` with FP8 products; ``weight`` receives the gradient, ``quantized_weight`` supplies the values."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor, quantized_weight: BlockScaled, recipe: Recipe) -> torch.Tensor:
        """``x [M, K]`` float32 or bfloat16 -> ``[M, N]`` in the dtype of x; ``quantized_weight`` has 128x128 tiles."""
        ctx.save_for_backward(x_MK)
        ctx.quantized_weight, ctx.recipe, ctx.weight_dtype = quantized_weight, recipe, weight_NK.dtype
        return block_scaled_matmul(_quantize(x_MK, recipe.forward_format, "1x128", recipe), quantized_weight, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:  # type: ignore[override]
        """Gradient of x in its dtype and of weight in its dtype."""
        (x_MK,) = ctx.saved_tensors
        dx = fp8_dgrad(dy_MN, ctx.quantized_weight, ctx.recipe).to(x_MK.dtype) if ctx.needs_input_grad[0] else None
        dw = fp8_wgrad(dy_MN, x_MK, ctx.recipe).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def fp8_dgrad(dy_MN: torch.Tensor, w: BlockScaled, recipe: Recipe) -> torch.Tensor:
    """float32 ``[M, K]``: the quantized output gradient times the weight's own codes, summed over N in blocks of 128."""
    dy = _quantize(dy_MN, recipe.backward_format, "1x128", recipe)
    return _block_sums(dy.codes, dy.scale_inv, w.codes, w.scale_inv, torch.float32)


def fp8_wgrad(dy_MN: torch.Tensor, x_MK: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """float32 ``[N, K]``: both operands quantized anew in 128x1 tiles along the tokens, summed over M in blocks of 128."""
    dy = _quantize(dy_MN, recipe.backward_format, "128x1", recipe)
    x = _quantize(x_MK, recipe.forward_format, "128x1", recipe)
    return _block_sums(dy.codes.t(), dy.scale_inv.t(), x.codes, x.scale_inv, torch.float32)


def _quantize(x: torch.Tensor, fp8_format: str | Fp8Format, tile: Any, recipe: Recipe) -> BlockScaled:
    return quantize_blockwise(x, fp8_format_of(fp8_format), tile, power_2_scale=recipe.power_2_scale, amax_epsilon=recipe.amax_epsilon)
