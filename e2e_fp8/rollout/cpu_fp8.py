"""Block-FP8 W8A8 for vLLM's CPU platform, with the arithmetic of the Hopper kernels.

vLLM has no block-FP8 W8A8 kernel for CPUs without AMX tiles. Activations are quantized 1x128 to E4M3 exactly as the
trainer does, products are FP32 sums of 128-wide blocks times both scales, and outputs are BF16. In a mixture of experts
the router's probability multiplies the *output* of ``down_proj``, as vLLM's GPU kernels do.

Shape legend: ``M`` tokens, ``K`` input and ``N`` output features, ``E`` experts, ``k`` experts per token, ``I`` width of
an expert, ``H`` hidden size, ``A <= M * k`` token-expert assignments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.platforms import PlatformEnum

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics import row_invariant
from e2e_fp8.numerics.blockwise import BlockScaled, quantize_blockwise
from e2e_fp8.numerics.formats import E4M3
from e2e_fp8.numerics.linear import block_scaled_matmul
from e2e_fp8.rollout.shared_operators import ADDITIONAL_CONFIG_KEY

_TOPK_SCHEMA = (
    "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, Tensor gating_output, "
    "bool renormalize, Tensor? bias) -> ()"
)
_libraries: list[torch.library.Library] = []


class ActivationQuantizer:
    """1x128 E4M3 quantization of activations with the engine's configured scale rounding."""

    def __init__(self) -> None:
        additional: Any = get_current_vllm_config().additional_config or {}
        options = additional.get(ADDITIONAL_CONFIG_KEY)
        if options is None:
            raise EngineError(
                "Block FP8 on the CPU needs to know how activations are scaled: pass "
                f"additional_config={{'{ADDITIONAL_CONFIG_KEY}': {{'power_2_scale': false, 'amax_epsilon': 0.0}}}} to vLLM."
            )
        self.power_2_scale = bool(options["power_2_scale"])
        self.amax_epsilon = float(options["amax_epsilon"])

    def __call__(self, x_MK: torch.Tensor) -> BlockScaled:
        return quantize_blockwise(x_MK, E4M3, "1x128", power_2_scale=self.power_2_scale, amax_epsilon=self.amax_epsilon)


class CpuFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """Linear layer: quantize activations, multiply codes, scale per block. Weights stay in checkpoint layout."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.quantize = ActivationQuantizer()

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the live bytes are the delivered bytes."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        weight = BlockScaled(layer.weight, layer.weight_scale_inv, "128x128")
        y_MN = block_scaled_matmul(self.quantize(x.reshape(-1, x.shape[-1])), weight, self.config.out_dtype)
        if bias is not None:
            y_MN = y_MN + bias
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        return block_scaled_matmul(BlockScaled(A, As, "1x128"), BlockScaled(B, Bs, "128x128"), self.config.out_dtype)


@dataclass(kw_only=True)
class ExpertOperators:
    """What a layer of experts shares with the trainer, and who watches it."""

    shared_swiglu: bool = False
    shared_combine: bool = False
    observe: Callable[[dict[str, torch.Tensor]], None] | None = None
    """Called with the intermediate values of each call (rows sorted by expert), for the parity chain."""


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_experts(
    x_MH: torch.Tensor,
    topk_weights_Mk: torch.Tensor,
    topk_ids_Mk: torch.Tensor,
    w13: BlockScaled,
    w2: BlockScaled,
    quantize: ActivationQuantizer,
    operators: ExpertOperators | None = None,
) -> torch.Tensor:
    """Output of the chosen experts, weighted and summed: ``[M, H]`` in the dtype of ``x_MH``.

    ``w13`` has codes ``[E, 2I, H]`` (gate rows first), ``w2`` ``[E, H, I]``. Each expert sees its tokens in batch order;
    the activation is ``silu(gate) * up`` with both steps rounded to the dtype of ``x_MH``; the sum runs in FP32. An id of -1 is
    an expert of another rank and adds nothing here.
    """
    operators = operators or ExpertOperators()
    M, top_k = topk_ids_Mk.shape
    ids = topk_ids_Mk.reshape(-1)
    order_A = ids.argsort(stable=True)[int((ids < 0).sum()) :]
    if order_A.numel() == 0:
        return torch.zeros_like(x_MH)
    counts = torch.bincount(ids[ids >= 0], minlength=w13.codes.shape[0]).tolist()
    token_A = order_A // top_k
    x = quantize(x_MH)
    # Indexing float8 tensors is not implemented everywhere; bytes are.
    codes_AH = x.codes.view(torch.uint8)[token_A].view(x.codes.dtype)
    gate_up_A2I = _per_expert(BlockScaled(codes_AH, x.scale_inv[token_A], "1x128"), w13, counts, x_MH.dtype)
    activation_AI = row_invariant.silu_and_mul(gate_up_A2I) if operators.shared_swiglu else _silu_and_mul(gate_up_A2I)
    y_AH = _per_expert(quantize(activation_AI), w2, counts, x_MH.dtype)
    if operators.observe is not None:
        operators.observe(
            {"gate_up": gate_up_A2I, "activation": activation_AI, "down": y_AH, "weights": topk_weights_Mk, "ids": topk_ids_Mk}
        )
    back_AH = y_AH.new_zeros(M * top_k, y_AH.shape[1])
    back_AH[order_A] = y_AH
    if operators.shared_combine:
        return row_invariant.combine(back_AH.view(M, top_k, -1), topk_weights_Mk)
    weighted = back_AH.view(M, top_k, -1).float() * topk_weights_Mk.unsqueeze(-1)
    return weighted.sum(dim=1).to(x_MH.dtype)


def _per_expert(x: BlockScaled, weight: BlockScaled, counts: list[int], out_dtype: torch.dtype) -> torch.Tensor:
    """Rows of ``x`` sorted by expert, ``counts[e]`` of them for expert e, each times its expert's weight: ``[A, N]``."""
    parts, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            part = BlockScaled(x.codes[rows], x.scale_inv[rows], "1x128")
            parts.append(block_scaled_matmul(part, BlockScaled(weight.codes[expert], weight.scale_inv[expert], "128x128"), out_dtype))
            start += count
    return torch.cat(parts)


class CpuFp8MoEMethod(Fp8MoEMethod):
    """Mixture of experts behind vLLM's own router, so that routed-experts capture works as on the GPU."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        super().__init__(quant_config, layer)
        self.quantize = ActivationQuantizer()
        self.operators = ExpertOperators()

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def follow(self, shared: set[str]) -> None:
        """Use the shared operators of these causes, and native ones of the others."""
        self.operators.shared_swiglu, self.operators.shared_combine = "swiglu" in shared, "combine" in shared

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing: the live bytes are the delivered bytes."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(self, layer: Any, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None) -> torch.Tensor:
        if layer.apply_router_weight_on_input:
            raise EngineError("Block FP8 experts on the CPU do not support router weights on the input.")
        if layer.expert_map is not None:
            # ids of the whole model to those of this rank, -1 for experts of other ranks; vLLM adds up what the ranks return
            topk_ids = layer.expert_map[topk_ids]
        w13 = BlockScaled(layer.w13_weight, layer.w13_weight_scale_inv, "128x128")
        w2 = BlockScaled(layer.w2_weight, layer.w2_weight_scale_inv, "128x128")
        return grouped_experts(x, topk_weights, topk_ids, w13, w2, self.quantize, self.operators)


class CpuRouterMethod(UnquantizedLinearMethod):
    """The router's product: torch's, with BF16 logits, or the operator shared with the trainer, with FP32 logits.

    Both read the live weight. vLLM's own method multiplies a packed copy, which an update in place, or by shared memory, would
    leave at the weights it was made from.
    """

    shared: bool = False

    def follow(self, shared: set[str]) -> None:
        """Use the shared product if its cause is among these."""
        self.shared = "router_gemm" in shared

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the live weight is the delivered one."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [M, H]`` -> logits ``[M, E]``."""
        if not self.shared:
            return F.linear(x, layer.weight, bias)  # pyright: ignore[reportArgumentType]
        if bias is not None:
            raise EngineError("The shared router has no bias.")
        return row_invariant.matmul_fp32(x, layer.weight)  # pyright: ignore[reportArgumentType]


class CpuFp8Config(Fp8Config):
    """vLLM's FP8 config with experts served by :class:`CpuFp8MoEMethod`, and a router that may be shared."""

    def get_quant_method(self, layer: Any, prefix: str):
        method = super().get_quant_method(layer, prefix)
        if prefix.endswith(".mlp.gate") and isinstance(method, UnquantizedLinearMethod):
            return CpuRouterMethod()
        return CpuFp8MoEMethod(self, layer) if isinstance(method, Fp8MoEMethod) else method


def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, bias=None) -> None:
    """CPU implementation of vLLM's router op: softmax over experts in FP32, top-k, optional renormalisation.

    Writes FP32 ``topk_weights`` and integer ``topk_indices``, both ``[M, k]``, highest probability first.
    """
    if bias is not None:
        raise EngineError("The CPU router has no correction bias.")
    weights, ids = gating_output.float().softmax(dim=-1).topk(topk_indices.shape[-1], dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(ids)


def register_cpu_fp8() -> None:
    """Put the kernel first in vLLM's CPU list, replace the FP8 config, add the router op that the CPU build lacks."""
    kernels = linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if CpuFp8BlockKernel not in kernels:
        # First, so that a machine with AMX tiles takes the same arithmetic.
        kernels.insert(0, CpuFp8BlockKernel)
    if get_quantization_config("fp8") is not CpuFp8Config:
        register_quantization_config("fp8")(CpuFp8Config)
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        library = torch.library.Library("_moe_C", "FRAGMENT")
        library.define(_TOPK_SCHEMA)
        library.impl("topk_softmax", topk_softmax, "CPU")
        _libraries.append(library)


def missing_registrations() -> list[str]:
    """Names of what :func:`register_cpu_fp8` should have registered and did not."""
    checks = {
        "CPU block-FP8 linear kernel": linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU][:1] == [CpuFp8BlockKernel],
        "CPU FP8 quantization config": get_quantization_config("fp8") is CpuFp8Config,
        "CPU router op": hasattr(torch.ops._moe_C, "topk_softmax"),
    }
    return [name for name, present in checks.items() if not present]
