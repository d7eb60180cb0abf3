"""The operators that the engine shares with the trainer, put into a loaded vLLM model on the CPU, cause by cause.

Which ones is said by the resolved choices in ``additional_config["e2e_fp8"]["alignment"]`` (e2e_fp8.config.alignment); without them the
model stays vLLM's own. Norms, activations and rotary embedding are vLLM custom ops, whose dispatched method is replaced; attention is the
layer's backend implementation. Router and experts are chosen when they are built (:mod:`e2e_fp8.rollout.cpu_fp8`).
"""

from functools import partial
from typing import Any

import torch

from e2e_fp8.config.alignment import ALIGNMENT_KEY, choices_at
from e2e_fp8.errors import EngineError
from e2e_fp8.numerics import row_invariant

ADDITIONAL_CONFIG_KEY = "e2e_fp8"
_NORM_CAUSES = {"q_norm": "qk_norm", "k_norm": "qk_norm", "norm": "final_norm"}
"""Last part of a norm's name -> its cause; all others are ``rms_norm``."""


def engine_choices(vllm_config: Any) -> dict[str, str]:
    """Cause -> choice of an engine; ``fast`` for one that was started without this package's settings."""
    options = (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY, {})
    return choices_at("fast") | options.get(ALIGNMENT_KEY, {})


def share_operators(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
    """Replace the operators of ``model`` whose cause is not ``native``. Before the first forward pass; a second call changes nothing.

    Raises:
        EngineError: the engine runs a module in a way the shared operator does not have.
    """
    choices = engine_choices(vllm_config)
    shared = {name for name, choice in choices.items() if choice != "native"}
    # On a GPU the choices hold only what needs no change of vLLM (e2e_fp8.config.alignment.choices_on).
    if not shared or device.type != "cpu":
        return
    for name, module in model.named_modules():
        _share(name, module, shared)


def _share(name: str, module: torch.nn.Module, shared: set[str]) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if isinstance(module, RMSNorm):
        cause = _NORM_CAUSES.get(name.rpartition(".")[2], "rms_norm")
        rounded = "residual_add" in shared
        if cause in shared or rounded:
            native = type(module).forward_native
            module._forward_method = partial(_norm, module, native, cause in shared, rounded)
    elif isinstance(module, SiluAndMul) and "swiglu" in shared:
        module._forward_method = row_invariant.silu_and_mul
    elif isinstance(module, RotaryEmbedding) and "rotary" in shared:
        if type(module) is not RotaryEmbedding or not module.is_neox_style or module.rotary_dim != module.head_size:
            raise EngineError(f"{name} is a {type(module).__name__}: the shared rotary embedding turns whole heads in NeoX order only.")
        module._forward_method = partial(_rotary, module)
    elif isinstance(module, LogitsProcessor) and "head" in shared:
        module._apply_head = _head  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(module, MoERunner) and shared & {"top_k", "gate_normalization"}:
        module.router._compute_routing = partial(_routing, module.router, shared)  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(module, Attention) and "attention" in shared:
        from e2e_fp8.rollout.shared_attention import SharedCpuAttention

        SharedCpuAttention.become(module.impl)


def _norm(module: Any, native: Any, shared: bool, rounded: bool, x: torch.Tensor, residual: torch.Tensor | None = None):
    """As vLLM's RMSNorm: the norm of ``x``, or ``(norm, sum)`` of the sum with ``residual``."""
    if residual is not None and not rounded:
        if not shared:
            return native(module, x, residual)
        total = x.float() + residual.float()
        normed = row_invariant.rms_norm(total, module.weight, module.variance_epsilon)
        return normed.to(x.dtype), total.to(x.dtype)
    if residual is not None:
        x = x + residual
    normed = row_invariant.rms_norm(x, module.weight, module.variance_epsilon) if shared else native(module, x)
    return normed if residual is None else (normed, x)


def _rotary(module: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
    cos, sin = row_invariant.rotary_table(float(module.base), module.head_size, module.max_position_embeddings)
    positions = positions.flatten()
    turned = [
        None
        if x is None
        else row_invariant.rotate(x.view(len(positions), -1, module.head_size), cos[positions], sin[positions]).view(x.shape)
        for x in (query, key)
    ]
    return turned[0], turned[1]


def _routing(
    router: Any,
    shared: set[str],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(weights float32 [M, k], ids [M, k])`` as vLLM's router wants them."""
    logits, probabilities = router_logits.float(), router_logits.float().softmax(dim=-1)
    ids = row_invariant.top_k(logits, router.top_k) if "top_k" in shared else probabilities.topk(router.top_k, dim=-1).indices
    if "gate_normalization" in shared:
        weights = row_invariant.router_weights(logits, ids, renormalize=router.renormalize)
    else:
        weights = probabilities.gather(1, ids)
        weights = weights / weights.sum(dim=-1, keepdim=True) if router.renormalize else weights
    return weights, ids.to(torch.int32 if indices_type is None else indices_type)


def _head(lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
    if embedding_bias is not None:
        raise EngineError("The shared head has no bias.")
    return row_invariant.matmul_fp32(hidden_states, lm_head.weight)
