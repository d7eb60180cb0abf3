"""Router logits of a mixture of experts in a stated precision, the same arithmetic for the trainer and the engine.

The weight is BF16 as delivered. ``bf16``: the result is rounded to BF16; ``fp32``: both operands are widened first; ``fp8``: both are
quantized as those of any linear (1x128 and 128x128 tiles, the last ones padded), and the result is rounded to BF16. The softmax that
follows is FP32 in all of them.

Shape legend: ``K`` hidden size, ``E`` experts.
"""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.linear import Fp8LinearFunction, Recipe

RouterPrecision = Literal["bf16", "fp32", "fp8"]


class RouterRecipe(Recipe, Protocol):
    """How an ``fp8`` router quantizes; ``QuantizationPlan`` is one."""

    @property
    def weight_power_2_scale(self) -> bool: ...


def router_logits(x: torch.Tensor, weight_EK: torch.Tensor, precision: RouterPrecision, recipe: RouterRecipe) -> torch.Tensor:
    """float32 ``[..., E]`` of BF16 ``x [..., K]``; differentiable in both operands."""
    if precision == "fp32":
        return F.linear(x.float(), weight_EK.float())
    if precision == "bf16":
        return F.linear(x, weight_EK).float()
    quantized = quantize_blockwise(
        weight_EK.detach(),
        recipe.forward_format,
        "128x128",
        power_2_scale=recipe.weight_power_2_scale,
        amax_epsilon=recipe.amax_epsilon,
    )
    logits = Fp8LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight_EK, quantized, recipe)
    return logits.view(*x.shape[:-1], weight_EK.shape[0]).float()
