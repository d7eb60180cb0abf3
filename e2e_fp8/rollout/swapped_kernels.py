"""Kernels of a live vLLM model swapped for a while, with every operator around them left as it is: for ``e2e-fp8 align explain``.

Each is a context manager of the model, entered on the engine's thread; nothing here is part of a run. Shape legend: ``M`` rows of a
product, ``N`` and ``K`` its widths, ``P`` rows of all experts, each expert's padded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.formats import E4M3, TILE
from e2e_fp8.rollout.shared_operators import set_method

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(codes [M, K], scale_inv [M, K / 128], weight codes [N, K], weight_scale_inv [N / 128, K / 128])`` -> bfloat16 ``[M, N]``."""
_CUTLASS_ROWS = 4
"""CUTLASS reads the scales of rows in columns of a multiple of 16 bytes."""


def triton_product(codes: torch.Tensor, scale_inv: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> torch.Tensor:
    """vLLM's Triton product of block-scaled operands."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    return w8a8_triton_block_scaled_mm(codes, weight, scale_inv, weight_scale_inv, [TILE, TILE], torch.bfloat16)


def cutlass_product(codes: torch.Tensor, scale_inv: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> torch.Tensor:
    """vLLM's CUTLASS product of block-scaled operands, rows padded with zeros."""
    from vllm import _custom_ops as ops

    rows = codes.shape[0]
    padded = -(-rows // _CUTLASS_ROWS) * _CUTLASS_ROWS
    codes_MK = torch.zeros(padded, codes.shape[1], dtype=torch.uint8, device=codes.device)
    codes_MK[:rows] = codes.view(torch.uint8)
    columns = torch.zeros(scale_inv.shape[1], padded, device=codes.device)
    columns[:, :rows] = scale_inv.t()
    product = ops.cutlass_scaled_mm(
        codes_MK.view(codes.dtype), weight.t(), scale_a=columns.t(), scale_b=weight_scale_inv.t(), out_dtype=torch.bfloat16
    )
    return product[:rows]


PRODUCTS: dict[str, Product] = {"gemm_triton": triton_product, "gemm_cutlass": cutlass_product}
"""Row of ``align explain`` -> product."""


def grouped_by_expert(
    product: Product,
    left: tuple[torch.Tensor, torch.Tensor],
    right: tuple[torch.Tensor, torch.Tensor],
    out_PN: torch.Tensor,
    expert_P: torch.Tensor,
) -> None:
    """As DeepGEMM's grouped product, one expert after another; rows of padding (expert below 0) are left as memory was.

    Looks at values, so it cannot be captured in a CUDA graph.
    """
    for expert in range(right[0].shape[0]):
        rows = (expert_P == expert).nonzero()[:, 0]
        if len(rows):
            codes = left[0].view(torch.uint8)[rows].view(left[0].dtype)
            out_PN[rows] = product(codes, left[1][rows], right[0][expert], right[1][expert])


@contextmanager
def swapped_products(model: torch.nn.Module, product: Product) -> Iterator[None]:
    """Every block-FP8 product of ``model``, linear layers and experts, in another implementation.

    Raises:
        EngineError: no layer has a product that can be swapped.
    """
    undo: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            kernel: Any = getattr(method, "fp8_linear", None)
            operators: Any = getattr(method, "operators", None)
            if hasattr(kernel, "apply_block_scaled_mm"):
                set_method(kernel, "apply_block_scaled_mm", _of_linear(product))
                undo.append(partial(set_method, kernel, "apply_block_scaled_mm", None))
            elif hasattr(operators, "grouped_product"):
                usual = operators.grouped_product
                operators.grouped_product = partial(grouped_by_expert, product)
                undo.append(partial(setattr, operators, "grouped_product", usual))
        if not undo:
            raise EngineError("This engine has no block-FP8 product of DeepGEMM that could be swapped.")
        yield
    finally:
        for give_back in reversed(undo):
            give_back()


def _of_linear(product: Product) -> Callable[..., torch.Tensor]:
    """As vLLM's kernels of linear layers name the operands."""

    def apply_block_scaled_mm(A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        return product(A, As, B, Bs)

    return apply_block_scaled_mm


@contextmanager
def own_experts(model: torch.nn.Module) -> Iterator[None]:
    """Layers of experts as vLLM runs them: its own quantizer, products, SwiGLU and sum.

    Raises:
        EngineError: no layer of experts has shared operators.
    """
    held: list[tuple[Any, Any]] = []
    try:
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(module, "w13_weight") and "apply" in getattr(method, "__dict__", {}):
                held.append((method, method.__dict__["apply"]))
                set_method(method, "apply", None)
        if not held:
            raise EngineError("This engine has no experts with operators shared with the trainer.")
        yield
    finally:
        for method, apply in held:
            set_method(method, "apply", apply)


@contextmanager
def rounded_cache(model: torch.nn.Module) -> Iterator[None]:
    """Keys and values rounded to E4M3 (scale 1, saturated, as vLLM writes an FP8 cache without calibration) on their way into the cache.

    Queries and the products of attention stay in BF16.
    """
    from vllm.model_executor.layers.attention import Attention

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return x.float().clamp(-E4M3.max_value, E4M3.max_value).to(torch.float8_e4m3fn).to(x.dtype)

    def enter(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *others = args
        return query, round_trip(key), round_trip(value), *others

    handles = [m.register_forward_pre_hook(enter) for m in model.modules() if isinstance(m, Attention)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
