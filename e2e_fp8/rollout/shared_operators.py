"""The operators that the engine shares with the trainer, put into a loaded vLLM model, cause by cause, on the CPU and on a GPU.

Which ones is said by the resolved choices in ``additional_config["e2e_fp8"]["alignment"]`` (e2e_fp8.config.alignment); without them the
model stays vLLM's own. Norms, activations, rotary embedding and, on a GPU, quantizers of activations are vLLM custom ops, whose
dispatched method is replaced; attention is the layer's backend implementation; router and experts follow by their quantization methods
(:mod:`e2e_fp8.rollout.cpu_fp8`, :mod:`e2e_fp8.rollout.cuda_fp8`). :mod:`e2e_fp8.rollout.live_operators` reads back what is there.

vLLM makes the weight-transfer engine, which calls :func:`share_operators`, right after it loaded the model, so before it profiles
memory and captures CUDA graphs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from e2e_fp8.config.alignment import ALIGNMENT_KEY, choices_at
from e2e_fp8.errors import EngineError
from e2e_fp8.numerics import row_invariant

ADDITIONAL_CONFIG_KEY = "e2e_fp8"
NORM_CAUSES = {"q_norm": "qk_norm", "k_norm": "qk_norm", "norm": "final_norm"}
"""Last part of a norm's name -> its cause; all others are ``rms_norm``."""
REPLACED = ("rms_norm", "residual_add", "qk_norm", "rotary", "attention", "swiglu", "router_gemm", "top_k", "gate_normalization", "combine")
"""Causes whose operator is put into the model, on both grounds."""

_TOUCHED = "_e2e_fp8_shared"
"""Attribute of a model that has, or once had, shared operators."""


def engine_options(vllm_config: Any) -> dict[str, Any]:
    """What this package's settings say to an engine; empty for one that was started without them."""
    return (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY, {})


def engine_choices(vllm_config: Any) -> dict[str, str]:
    """Cause -> choice of an engine; ``fast`` for one that was started without this package's settings."""
    return choices_at("fast") | engine_options(vllm_config).get(ALIGNMENT_KEY, {})


def share_operators(model: torch.nn.Module, vllm_config: Any, device: torch.device, choices: Mapping[str, str] | None = None) -> None:
    """Give ``model`` the operators that ``choices`` (or the engine's own) say, ``native`` ones too; may be called again between requests.

    Whoever calls it again forgets all cached prefixes first, since two attentions may lay out the cache differently, and runs without
    CUDA graphs, which keep the operators that they were captured with.

    Raises:
        EngineError: the engine runs a module in a way the shared operator does not have.
    """
    choices = engine_choices(vllm_config) if choices is None else choices
    shared = {name for name, choice in choices.items() if choice != "native"}
    if device.type == "cuda" and vllm_config.use_v2_model_runner:
        # of the process, not of the model
        from e2e_fp8.rollout.sampler_patches import share_sampler

        share_sampler(shared)
    if device.type == "cuda" and not shared and not hasattr(model, _TOUCHED):
        # a compiled model is traced as vLLM made it
        return
    setattr(model, _TOUCHED, True)
    amax_epsilon = float(engine_options(vllm_config).get("amax_epsilon", 0.0))
    for name, module in model.named_modules():
        _share_custom_op(name, module, shared, device)
        _share_layer(module, shared, device)
    if device.type == "cuda":
        from e2e_fp8.rollout.cuda_fp8 import share_products

        _check_compilation(vllm_config, shared)
        for name, module in model.named_modules():
            share_products(name, module, shared, amax_epsilon)


def _check_compilation(vllm_config: Any, shared: set[str]) -> None:
    mode = vllm_config.compilation_config.mode
    if shared & {*REPLACED, "final_norm", "head", "activation_scales"} and int(mode or 0) != 0:
        raise EngineError(
            f"numerics.alignment shares {', '.join(sorted(shared))}, but this engine compiles the model (compilation mode {mode}), and "
            "compiled fusions round differently: start it with the run's arguments, or with --enforce-eager."
        )


def set_forward_method(module: Any, chosen: Callable[..., Any] | None) -> None:
    """Replace the method that a vLLM custom op dispatched to when it was made, or with None give it back."""
    native = module.__dict__.setdefault("_e2e_fp8_native", module._forward_method)
    module._forward_method = native if chosen is None else chosen


def _share_custom_op(name: str, module: torch.nn.Module, shared: set[str], device: torch.device) -> None:
    """Norms, activation and rotary embedding: vLLM calls the method that it once dispatched to."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if isinstance(module, RMSNorm):
        cause = NORM_CAUSES.get(name.rpartition(".")[2], "rms_norm")
        chosen = None
        if cause in shared or "residual_add" in shared:
            set_forward_method(module, None)
            chosen = partial(shared_norm, module, module._forward_method, cause in shared, "residual_add" in shared)
        set_forward_method(module, chosen)
    elif isinstance(module, SiluAndMul):
        set_forward_method(module, row_invariant.silu_and_mul if "swiglu" in shared else None)
    elif isinstance(module, RotaryEmbedding):
        set_forward_method(module, _rotary_of(name, module, device) if "rotary" in shared else None)


def _share_layer(module: torch.nn.Module, shared: set[str], device: torch.device) -> None:
    """Head, router, experts and attention."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if isinstance(module, LogitsProcessor):
        set_method(module, "_apply_head", shared_head if "head" in shared else None)
    elif isinstance(module, MoERunner):
        routing = partial(shared_routing, module.router, shared) if shared & {"top_k", "gate_normalization"} else None
        set_method(module.router, "_compute_routing", routing)
    elif isinstance(module, Attention):
        attention_class(device).set(module.impl, shared="attention" in shared)
    method: Any = getattr(module, "quant_method", None)
    if hasattr(method, "follow"):
        method.follow(shared)


def attention_class(device: torch.device) -> Any:
    """The shared attention of a ground."""
    if device.type == "cuda":
        from e2e_fp8.rollout.shared_flash_attention import SharedFlashAttention

        return SharedFlashAttention
    from e2e_fp8.rollout.shared_attention import SharedCpuAttention

    return SharedCpuAttention


def set_method(owner: Any, name: str, method: Callable[..., Any] | None) -> None:
    """Replace a method of one object, or give it its class's again."""
    if method is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = method


def shared_norm(module: Any, native: Any, shared: bool, rounded: bool, x: torch.Tensor, residual: torch.Tensor | None = None):
    """As vLLM's RMSNorm: the norm of ``x``, or ``(norm, sum)`` of the sum with ``residual``."""
    if residual is not None and not rounded and not shared:
        return native(x, residual)
    if residual is not None and not rounded and x.device.type == "cpu":
        # as vLLM's CPU kernel; its CUDA kernel normalises the rounded sum
        total = x.float() + residual.float()
        normed = row_invariant.rms_norm(total, module.weight, module.variance_epsilon)
        return normed.to(x.dtype), total.to(x.dtype)
    if residual is not None and shared:
        return row_invariant.add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    if residual is not None:
        x = x + residual
    normed = row_invariant.rms_norm(x, module.weight, module.variance_epsilon) if shared else native(x)
    return normed if residual is None else (normed, x)


def _rotary_of(name: str, module: Any, device: torch.device) -> Callable[..., Any]:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if type(module) is not RotaryEmbedding or not module.is_neox_style or module.rotary_dim != module.head_size:
        raise EngineError(f"{name} is a {type(module).__name__}: the shared rotary embedding turns whole heads in NeoX order only.")
    cos, sin = row_invariant.rotary_table(float(module.base), module.head_size, module.max_position_embeddings, device)
    # one table, so that a step gathers once
    return partial(shared_rotary, module, torch.cat([cos, sin], dim=-1))


def shared_rotary(module: Any, table: torch.Tensor, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
    """As vLLM's RotaryEmbedding; ``table [max_positions, D]`` has cosines, then sines."""
    cos, sin = table[positions.flatten()].chunk(2, dim=-1)
    turned = [
        None if x is None else row_invariant.rotate(x.view(len(cos), -1, module.head_size), cos, sin).view(x.shape) for x in (query, key)
    ]
    return turned[0], turned[1]


def shared_routing(
    router: Any,
    shared: set[str],
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(weights float32 [M, k], ids [M, k])`` as vLLM's router wants them."""
    logits = router_logits.float()
    probabilities = None if {"top_k", "gate_normalization"} <= shared else logits.softmax(dim=-1)
    ids = (
        row_invariant.top_k(logits, router.top_k)
        if probabilities is None or "top_k" in shared
        else probabilities.topk(router.top_k, dim=-1).indices
    )
    if probabilities is None or "gate_normalization" in shared:
        weights = row_invariant.router_weights(logits, ids, renormalize=router.renormalize)
    else:
        weights = probabilities.gather(1, ids)
        weights = weights / weights.sum(dim=-1, keepdim=True) if router.renormalize else weights
    return weights, ids.to(torch.int32 if indices_type is None else indices_type)


def shared_head(lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
    """As vLLM's LogitsProcessor._apply_head."""
    if embedding_bias is not None:
        raise EngineError("The shared head has no bias.")
    return row_invariant.matmul_fp32(hidden_states, lm_head.weight)
