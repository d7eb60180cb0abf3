"""The operators that the engine shares with the trainer, put into a loaded vLLM model on the CPU, cause by cause.

Which ones is said by the resolved choices in ``additional_config["e2e_fp8"]["alignment"]`` (e2e_fp8.config.alignment); without them the
model stays vLLM's own. Norms, activations and rotary embedding are vLLM custom ops, whose dispatched method is replaced; attention is the
layer's backend implementation; router and experts follow by their quantization methods (:mod:`e2e_fp8.rollout.cpu_fp8`).
"""

from collections.abc import Callable, Mapping
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


def share_operators(model: torch.nn.Module, choices: Mapping[str, str], device: torch.device) -> None:
    """Give ``model`` the operators that ``choices`` say, ``native`` ones too; it may be called again between requests.

    Whoever calls it again forgets all cached prefixes first: the two attentions lay out the cache differently.

    Raises:
        EngineError: the engine runs a module in a way the shared operator does not have.
    """
    # On a GPU the choices hold only what needs no change of vLLM (e2e_fp8.config.alignment.choices_on).
    if device.type != "cpu":
        return
    shared = {name for name, choice in choices.items() if choice != "native"}
    for name, module in model.named_modules():
        _share_custom_op(name, module, shared)
        _share_layer(module, shared)


def _share_custom_op(name: str, module: torch.nn.Module, shared: set[str]) -> None:
    """Norms, activation and rotary embedding: vLLM calls the method that it once dispatched to."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if not isinstance(module, RMSNorm | SiluAndMul | RotaryEmbedding):
        return
    native = module.__dict__.setdefault("_e2e_fp8_native", module._forward_method)
    chosen = native
    if isinstance(module, RMSNorm):
        cause = _NORM_CAUSES.get(name.rpartition(".")[2], "rms_norm")
        if cause in shared or "residual_add" in shared:
            chosen = partial(_norm, module, native, cause in shared, "residual_add" in shared)
    elif isinstance(module, SiluAndMul):
        chosen = row_invariant.silu_and_mul if "swiglu" in shared else native
    elif "rotary" in shared:
        if type(module) is not RotaryEmbedding or not module.is_neox_style or module.rotary_dim != module.head_size:
            raise EngineError(f"{name} is a {type(module).__name__}: the shared rotary embedding turns whole heads in NeoX order only.")
        chosen = partial(_rotary, module)
    module._forward_method = chosen


def _share_layer(module: torch.nn.Module, shared: set[str]) -> None:
    """Head, router, experts and attention."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from e2e_fp8.rollout.shared_attention import SharedCpuAttention

    if isinstance(module, LogitsProcessor):
        _set_method(module, "_apply_head", _head if "head" in shared else None)
    elif isinstance(module, MoERunner):
        routing = partial(_routing, module.router, shared) if shared & {"top_k", "gate_normalization"} else None
        _set_method(module.router, "_compute_routing", routing)
    elif isinstance(module, Attention):
        SharedCpuAttention.set(module.impl, shared="attention" in shared)
    method: Any = getattr(module, "quant_method", None)
    if hasattr(method, "follow"):
        method.follow(shared)


def _set_method(owner: Any, name: str, method: Callable[..., Any] | None) -> None:
    """Replace a method of one object, or give it its class's again."""
    if method is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = method


def _norm(module: Any, native: Any, shared: bool, rounded: bool, x: torch.Tensor, residual: torch.Tensor | None = None):
    """As vLLM's RMSNorm: the norm of ``x``, or ``(norm, sum)`` of the sum with ``residual``."""
    if residual is not None and not rounded:
        if not shared:
            return native(x, residual)
        total = x.float() + residual.float()
        normed = row_invariant.rms_norm(total, module.weight, module.variance_epsilon)
        return normed.to(x.dtype), total.to(x.dtype)
    if residual is not None:
        x = x + residual
    normed = row_invariant.rms_norm(x, module.weight, module.variance_epsilon) if shared else native(x)
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
