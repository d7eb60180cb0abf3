"""Reference block-FP8 linear: the three products of a training step on the CPU.

    fprop  y  = x(E4M3, 1x128) @ w(E4M3, 128x128).T
    dgrad  dx = dy(E5M2, 1x128) @ w(the same codes)
    wgrad  dw = dy(E5M2, 128x1).T @ x(E4M3, 128x1)

Partial products of codes over one block of the summed axis are formed in FP32, multiplied by the two scale_inv, and
accumulated in FP32, as the Hopper kernels do. Legend: M tokens, N out features, K in features.
"""

from typing import Any

import torch

from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise
from e2e_fp8.numerics.formats import TILE, Fp8Format, fp8_format_of


def block_scaled_matmul(x: BlockScaled, w: BlockScaled, out_dtype: torch.dtype) -> torch.Tensor:
    """``x [M, K]`` (1x128 tiles) times ``w [N, K]`` (128x128 tiles) transposed -> ``[M, N]``."""
    return _accumulate(
        x.codes.float(), x.scale_inv, w.codes.float().t(), w.scale_inv.repeat_interleave(TILE, 0)[: w.codes.shape[0]].t(), out_dtype
    )


def _accumulate(
    a_MS: torch.Tensor, a_scale_inv_Ms: torch.Tensor, b_SN: torch.Tensor, b_scale_inv_sN: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Sum over blocks s of the summed axis S of (a_s @ b_s) * a_scale_inv_s * b_scale_inv_s, in FP32."""
    summed = a_MS.shape[1]
    if summed == 0 or a_MS.shape[0] == 0:
        return torch.zeros(a_MS.shape[0], b_SN.shape[1], dtype=out_dtype)
    total = None
    for block, start in enumerate(range(0, summed, TILE)):
        partial = a_MS[:, start : start + TILE] @ b_SN[start : start + TILE]
        partial.mul_(a_scale_inv_Ms[:, block : block + 1]).mul_(b_scale_inv_sN[block : block + 1])
        total = partial if total is None else total.add_(partial)
    assert total is not None
    return total.to(out_dtype)


class Fp8LinearFunction(torch.autograd.Function):
    """``y = x @ w.T`` with FP8 products; ``weight`` receives the gradient, ``quantized_weight`` supplies the values."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor, quantized_weight: BlockScaled, recipe: Any) -> torch.Tensor:
        """``x [M, K]`` -> ``[M, N]`` in the dtype of x; ``recipe`` has forward_format, backward_format, power_2_scale, amax_epsilon."""
        x = quantize_blockwise(
            x_MK, fp8_format_of(recipe.forward_format), "1x128", power_2_scale=recipe.power_2_scale, amax_epsilon=recipe.amax_epsilon
        )
        ctx.save_for_backward(x_MK)
        ctx.quantized_weight, ctx.recipe, ctx.weight_dtype = quantized_weight, recipe, weight_NK.dtype
        return block_scaled_matmul(x, quantized_weight, x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:  # type: ignore[override]
        """Gradients of x and weight."""
        (x_MK,) = ctx.saved_tensors
        recipe = ctx.recipe
        forward, backward = fp8_format_of(recipe.forward_format), fp8_format_of(recipe.backward_format)
        dy_MN = dy_MN.contiguous()
        dx = _dgrad(dy_MN, ctx.quantized_weight, backward, recipe).to(x_MK.dtype) if ctx.needs_input_grad[0] else None
        dw = _wgrad(dy_MN, x_MK, backward, forward, recipe).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def _dgrad(dy_MN: torch.Tensor, w: BlockScaled, fp8_format: Fp8Format, recipe: Any) -> torch.Tensor:
    dy = quantize_blockwise(dy_MN, fp8_format, "1x128", power_2_scale=recipe.power_2_scale, amax_epsilon=recipe.amax_epsilon)
    columns = w.codes.shape[1]
    return _accumulate(dy.codes.float(), dy.scale_inv, w.codes.float(), w.scale_inv.repeat_interleave(TILE, 1)[:, :columns], torch.float32)


def _wgrad(dy_MN: torch.Tensor, x_MK: torch.Tensor, backward: Fp8Format, forward: Fp8Format, recipe: Any) -> torch.Tensor:
    dy = quantize_blockwise(dy_MN, backward, "128x1", power_2_scale=recipe.power_2_scale, amax_epsilon=recipe.amax_epsilon)
    x = quantize_blockwise(x_MK, forward, "128x1", power_2_scale=recipe.power_2_scale, amax_epsilon=recipe.amax_epsilon)
    return _accumulate(dy.codes.float().t(), dy.scale_inv.t(), x.codes.float(), x.scale_inv, torch.float32)
