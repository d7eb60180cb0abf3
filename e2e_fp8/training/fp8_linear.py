"""Megatron's parallel linears with block-FP8 products on the CPU.

The BF16 parameter is bf16(FP32 master), kept by the distributed optimizer. The FP8 codes of a weight are its 128x128 quantization,
made once after each parameter sync and used by forward and backward until the next one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise
from e2e_fp8.numerics.linear import Fp8LinearFunction
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.training.column_input import column_input


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """How one linear quantizes: formats by name (``e4m3``, ``e5m2``), kind of scales, smallest tile amax.

    ``power_2_scale`` is that of activations and gradients.
    """

    forward_format: Any
    backward_format: Any
    power_2_scale: bool
    weight_power_2_scale: bool
    amax_epsilon: float

    @classmethod
    def from_plan(cls, plan: QuantizationPlan) -> "LinearRecipe":
        """The recipe of every FP8 module of ``plan``."""
        return cls(
            forward_format=plan.forward_format,
            backward_format=plan.backward_format,
            power_2_scale=plan.power_2_scale,
            weight_power_2_scale=plan.weight_power_2_scale,
            amax_epsilon=plan.amax_epsilon,
        )


class BlockFp8Mixin:
    """Adds block-FP8 products to a Megatron linear; BF16 until ``enable_fp8`` is called."""

    weight: torch.nn.Parameter
    recipe: LinearRecipe | None = None
    quantized_weight: BlockScaled | None = None
    high_precision: bool = False
    """Multiply the BF16 parameter, which is bf16(FP32 master), instead of its FP8 codes."""
    _quantized_version: int = -1

    def place_quantized_weight(self, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Keep the codes ``[N, K]`` and scales in the given memory from the next refresh on."""
        self.quantized_weight = BlockScaled(codes, scale_inv, "128x128")
        self._quantized_version = -1

    def enable_fp8(self, recipe: LinearRecipe) -> None:
        """Switch this linear to FP8.

        Raises:
            ConfigError: the linear has a bias or uses fused gradient accumulation.
        """
        if getattr(self, "bias", None) is not None or getattr(self, "gradient_accumulation_fusion", False):
            raise ConfigError("Block-FP8 linears on the CPU support no bias or fused gradient accumulation.")
        self.recipe = recipe

    def refresh_quantized_weight(self) -> None:
        """Quantize the current BF16 weight, into the same memory as before; call after every parameter sync."""
        if self.recipe is None:
            return
        fresh = quantize_blockwise(
            self.weight.detach(),
            self.recipe.forward_format,
            "128x128",
            power_2_scale=self.recipe.weight_power_2_scale,
            amax_epsilon=self.recipe.amax_epsilon,
        )
        if self.quantized_weight is None:
            self.quantized_weight = fresh
        else:
            self.quantized_weight.codes.view(torch.uint8).copy_(fresh.codes.view(torch.uint8))
            self.quantized_weight.scale_inv.copy_(fresh.scale_inv)
        self._quantized_version = self.weight._version

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any, **kwargs: Any
    ) -> torch.Tensor:
        parallel = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
        if self.recipe is None or self.high_precision:
            return super()._forward_impl(input=input, weight=weight, **parallel, **kwargs)  # type: ignore[misc]
        if self.quantized_weight is None or self._quantized_version != weight._version:
            raise RuntimeError(
                "The FP8 codes of a weight are older than the weight: refresh_quantized_weight was not called after the parameter sync."
            )
        return fp8_linear(column_input(input, **parallel), weight, self.quantized_weight, self.recipe)


def fp8_linear(input: torch.Tensor, weight: torch.Tensor, quantized_weight: BlockScaled, recipe: LinearRecipe) -> torch.Tensor:
    """``input [..., K]`` times ``weight [N, K]`` transposed -> ``[..., N]`` in the input's dtype."""
    x_MK = input.reshape(-1, input.size(-1))
    y_MN = Fp8LinearFunction.apply(x_MK, weight, quantized_weight, recipe)
    return y_MN.view(*input.shape[:-1], weight.size(0))


class BlockFp8ColumnParallelLinear(BlockFp8Mixin, ColumnParallelLinear):
    """Column-parallel linear of the CPU ground."""


class BlockFp8RowParallelLinear(BlockFp8Mixin, RowParallelLinear):
    """Row-parallel linear of the CPU ground."""
