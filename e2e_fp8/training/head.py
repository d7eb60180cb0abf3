"""FP32 logits from BF16 operands, and a critic's values, on both grounds.

Shape legend: ``T`` tokens, ``H`` hidden width, ``V`` vocabulary rows of this rank.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from e2e_fp8.errors import ConfigError
from e2e_fp8.numerics.row_invariant import matmul_fp32
from e2e_fp8.training.column_input import column_input


def matmul_fp32_out(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` with FP32 accumulation and FP32 result; operands keep their (BF16) values."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


class Fp32LogitsFunction(torch.autograd.Function):
    """``x_TH @ w_VH.T`` in FP32, with ``row_invariant`` in the operator shared with the engine.

    The backward products take the logit gradient rounded to the operands' dtype.
    """

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, w_VH: torch.Tensor, row_invariant: bool) -> torch.Tensor:
        ctx.save_for_backward(x_TH, w_VH)
        return matmul_fp32(x_TH, w_VH) if row_invariant else matmul_fp32_out(x_TH, w_VH.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_TH, w_VH = ctx.saved_tensors
        grad_TV = grads[0].to(x_TH.dtype)
        grad_x = matmul_fp32_out(grad_TV, w_VH).to(x_TH.dtype) if ctx.needs_input_grad[0] else None
        grad_w = matmul_fp32_out(grad_TV.t(), x_TH).to(w_VH.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


class Fp32OutputLayer(ColumnParallelLinear):
    """Megatron's output layer with FP32 logits; ``become`` turns a built one into this class, keeping its parameters."""

    row_invariant: bool = False

    @classmethod
    def become(cls, layer: ColumnParallelLinear, *, row_invariant: bool = False) -> None:
        """Change the class of ``layer`` in place.

        Raises:
            ConfigError: the layer is of another class, or has a bias or fused gradient accumulation.
        """
        if type(layer) is not ColumnParallelLinear:
            raise ConfigError(
                f"The output layer is a {type(layer).__name__}, not Megatron's ColumnParallelLinear; FP32 logits need that class."
            )
        if layer.bias is not None or layer.gradient_accumulation_fusion:
            raise ConfigError("FP32 logits support no bias or fused gradient accumulation.")
        layer.__class__ = cls
        layer.row_invariant = row_invariant  # pyright: ignore[reportArgumentType]

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *, allreduce_dgrad: bool, sequence_parallel: bool, tp_group: Any, **kwargs: Any
    ) -> torch.Tensor:
        x = column_input(input, allreduce_dgrad=allreduce_dgrad, sequence_parallel=sequence_parallel, tp_group=tp_group)
        return Fp32LogitsFunction.apply(x.reshape(-1, x.size(-1)), weight, self.row_invariant).view(*x.shape[:-1], weight.size(0))


class ValueHead(torch.nn.Module):
    """One value for each token, ``x_TH @ w_1H.T`` with FP32 weight and product, in the place of Megatron's output layer.

    Every tensor rank holds the whole row. Under sequence parallelism it sees this rank's tokens only; values are gathered, and
    Megatron adds up the row's gradient over the tensor ranks.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.weight.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, fn: Any, recurse: bool = True) -> "ValueHead":
        # Megatron's Float16Module turns a whole model into BF16
        return super()._apply(lambda tensor: fn(tensor).float(), recurse)

    def forward(self, input: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        """``([T, ..., 1] float32, None)``, as Megatron calls an output layer."""
        values = torch.nn.functional.linear(input.float(), self.weight)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
