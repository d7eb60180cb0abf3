"""Block-FP8 products of a live vLLM model on a Hopper GPU, with the operators that the trainer shares.

The products stay DeepGEMM's, which are Transformer Engine's bit for bit and row by row. What is replaced is around them: the quantizer of
activations (vLLM divides amax by 448 where Transformer Engine inverts 448 / amax), in a layer of experts also SwiGLU and the sum over a
token's experts, and with them vLLM's choice of Triton for few tokens and narrow experts.

Nothing here waits for the GPU or depends on routed counts on the host, so that decoding can be captured in CUDA graphs.

Shape legend: ``M`` tokens, ``H`` hidden size, ``I`` width of an expert, ``E`` experts, ``k`` experts per token, ``P`` rows of all experts,
each expert's padded to DeepGEMM's alignment, ``A = M * k``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_moe_permute, deepgemm_unpermute_and_reduce
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous, mk_alignment_scope

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics import row_invariant
from e2e_fp8.numerics.row_fused_cuda import silu_and_mul_quantized
from e2e_fp8.rollout.shared_operators import set_forward_method, set_method

EXPERT_CAUSES = ("activation_scales", "swiglu", "combine")
"""Causes inside a layer of experts; with one of them shared, the layer runs :class:`SharedExperts`."""
TILE = 128
_PRODUCT = "DeepGemmFp8BlockScaledMMKernel"


def share_products(name: str, module: torch.nn.Module, shared: set[str], amax_epsilon: float) -> None:
    """Give a linear layer, router or layer of experts what ``shared`` says, or vLLM's own again.

    Raises:
        EngineError: a layer does not run on DeepGEMM, or its experts have more than the shared ones do.
    """
    method: Any = getattr(module, "quant_method", None)
    if isinstance(method, Fp8LinearMethod):
        _share_linear(name, method, shared, amax_epsilon)
    elif isinstance(module, RoutedExperts) and isinstance(method, Fp8MoEMethod):
        _share_experts(name, module, method, shared, amax_epsilon)
    elif name.endswith(".mlp.gate") and type(method) is UnquantizedLinearMethod:
        set_method(method, "apply", shared_router if "router_gemm" in shared else None)


def _share_linear(name: str, method: Any, shared: set[str], amax_epsilon: float) -> None:
    wanted, kernel = "activation_scales" in shared, method.fp8_linear
    if wanted and type(kernel).__name__ != _PRODUCT:
        raise EngineError(
            f"{name} runs on {type(kernel).__name__}, whose sums differ from the trainer's: the shared activation scales need {_PRODUCT}. "
            "Unset VLLM_USE_DEEP_GEMM and VLLM_DISABLED_KERNELS, or set numerics.alignment_overrides.activation_scales to native."
        )
    if type(kernel).__name__ == _PRODUCT:
        set_forward_method(kernel.quant_fp8, partial(shared_quantizer, amax_epsilon) if wanted else None)


def shared_quantizer(
    amax_epsilon: float, x: torch.Tensor, scale: Any = None, scale_ub: Any = None, use_triton: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's QuantFP8 of groups of 128: E4M3 codes ``[M, K]`` and float32 factors ``[M, K / 128]``."""
    return row_invariant.quantize_activations(x, amax_epsilon=amax_epsilon, column_major=True)


def shared_router(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [M, H]`` -> float32 logits ``[M, E]``."""
    if bias is not None:
        raise EngineError("The shared router has no bias.")
    return row_invariant.matmul_fp32(x, layer.weight)


def _share_experts(name: str, layer: Any, method: Any, shared: set[str], amax_epsilon: float) -> None:
    wanted = shared & {*EXPERT_CAUSES}
    if not wanted:
        method.__dict__.pop("operators", None)
        set_method(method, "apply", None)
        return
    plain = (
        method.fp8_backend.name == "DEEPGEMM"
        and method.block_quant
        and layer.expert_map is None
        and not layer.apply_router_weight_on_input
        and not method.moe.has_bias
        and layer.activation.value == "silu"
    )
    if not plain:
        raise EngineError(
            f"numerics.alignment shares {', '.join(sorted(wanted))}, but {name} is more than SiLU experts of one rank on DeepGEMM (backend "
            f"{method.fp8_backend.name}): set rollout.moe_backend to deep_gemm and rollout.expert_parallel to false."
        )
    method.operators = SharedExperts(wanted, amax_epsilon)
    set_method(method, "apply", method.operators)


class SharedExperts:
    """Takes the place of one layer's ``Fp8MoEMethod.apply``."""

    def __init__(self, shared: set[str], amax_epsilon: float) -> None:
        self.shared = frozenset(shared)
        self.amax_epsilon = amax_epsilon
        self.observe: Callable[[dict[str, torch.Tensor]], None] | None = None
        """Called with the intermediate values of each call (rows sorted by expert), for the parity chain."""
        self.grouped_product: Callable[..., Any] = m_grouped_fp8_gemm_nt_contiguous
        """DeepGEMM's, but for ``align explain`` (e2e_fp8.rollout.swapped_kernels)."""

    def __call__(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[M, H]`` of ``x [M, H]``, weights float32 and ids ``[M, k]``."""
        if shared_experts is not None:
            raise EngineError("Experts with operators shared with the trainer have no expert that every token takes.")
        codes, scale_inv = self.quantize(x, column_major=False)
        codes_PH, scale_inv_P, expert_P, place_Mk, alignment = deepgemm_moe_permute(
            aq=codes,
            aq_scale=scale_inv,
            topk_ids=topk_ids,
            local_num_experts=layer.w13_weight.shape[0],
            expert_map=None,
            expert_tokens_meta=None,
        )
        rows = codes_PH.shape[0]
        gate_up_P2I = x.new_empty(rows, layer.w13_weight.shape[1])
        down_PH = x.new_empty(rows, layer.w2_weight.shape[1])
        # DeepGEMM's tiles must not be taller than an expert's padding, or one would span two experts.
        with mk_alignment_scope(alignment):
            w13 = (layer.w13_weight, layer.w13_weight_scale_inv)
            self.grouped_product((codes_PH, scale_inv_P), w13, gate_up_P2I, expert_P)
            w2 = (layer.w2_weight, layer.w2_weight_scale_inv)
            self.grouped_product(self.activation_codes(gate_up_P2I, expert_P), w2, down_PH, expert_P)
        if self.observe is not None:
            order_A = place_Mk.reshape(-1)[topk_ids.reshape(-1).argsort(stable=True)]
            gate_up_A2I = gate_up_P2I[order_A]
            values = {"gate_up": gate_up_A2I, "activation": self.activation(gate_up_A2I), "down": down_PH[order_A]}
            self.observe(values | {"weights": topk_weights, "ids": topk_ids})
        return self.combine(down_PH, place_Mk, topk_weights, topk_ids)

    def quantize(self, x: torch.Tensor, *, column_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """E4M3 codes and float32 factors of 1x128 tiles: in columns for a product, in rows for vLLM's permutation, which ignores the
        distance of columns."""
        if "activation_scales" in self.shared:
            return row_invariant.quantize_activations(x, amax_epsilon=self.amax_epsilon, column_major=column_major)
        return per_token_group_quant_fp8(x, TILE)

    def activation_codes(self, gate_up_P2I: torch.Tensor, expert_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The quantized activation; rows of padding hold whatever was in memory, and it stays in its row."""
        if {"swiglu", "activation_scales"} <= self.shared:
            return silu_and_mul_quantized(gate_up_P2I, expert_P, amax_epsilon=self.amax_epsilon)
        return self.quantize(self.activation(gate_up_P2I), column_major=True)

    def activation(self, gate_up_P2I: torch.Tensor) -> torch.Tensor:
        """``[P, I]``."""
        if "swiglu" in self.shared:
            return row_invariant.silu_and_mul(gate_up_P2I)
        out = gate_up_P2I.new_empty(gate_up_P2I.shape[0], gate_up_P2I.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up_P2I)
        return out

    def combine(self, down_PH: torch.Tensor, place_Mk: torch.Tensor, weights_Mk: torch.Tensor, ids_Mk: torch.Tensor) -> torch.Tensor:
        """``[M, H]``, the weighted sum of each token's rows."""
        if "combine" in self.shared:
            return row_invariant.combine(down_PH, weights_Mk, place_Mk)
        out = down_PH.new_empty(place_Mk.shape[0], down_PH.shape[1])
        deepgemm_unpermute_and_reduce(
            a=down_PH, topk_ids=ids_Mk, topk_weights=weights_Mk, inv_perm=place_Mk, expert_map=None, output=out
        )  # fmt: skip
        return out
