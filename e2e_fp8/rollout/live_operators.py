"""Which operators a loaded vLLM model really has, read from the model and not from what was asked for."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from e2e_fp8.numerics import row_invariant
from e2e_fp8.rollout.sampler_patches import is_live
from e2e_fp8.rollout.shared_operators import NORM_CAUSES, attention_class, shared_head, shared_norm, shared_rotary, shared_routing

SAMPLER_CAUSES = ("log_softmax", "temperature")
"""Of the sampler; vLLM's first model runner always has them (e2e_fp8.rollout.sampler_patches)."""
NAMED = 3
"""Native layers that are named for each cause; the others are counted."""


def live_operators(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> dict[str, dict[str, Any]]:
    """Cause -> ``shared`` and ``native`` (numbers of modules with either operator), ``shared_at`` and ``native_at`` (first names).

    A cause without a module in this model is absent, and so are those that are not in the model: on a GPU the sampler's two are
    reported as module ``sampler``.
    """
    found: dict[str, dict[str, Any]] = {}
    for cause, name, shared in _states(model, vllm_config, device):
        entry = found.setdefault(cause, {"shared": 0, "native": 0, "shared_at": [], "native_at": []})
        kind = "shared" if shared else "native"
        entry[kind] += 1
        if len(entry[f"{kind}_at"]) < NAMED:
            entry[f"{kind}_at"].append(name)
    return found


def _states(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> Iterator[tuple[str, str, bool]]:
    """``(cause, module, shared)`` of all operators."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield from _norm(name, module)
        elif isinstance(module, SiluAndMul):
            yield "swiglu", name, module._forward_method is row_invariant.silu_and_mul
        elif isinstance(module, RotaryEmbeddingBase):
            yield "rotary", name, _partial_of(module._forward_method, shared_rotary) is not None
        elif isinstance(module, LogitsProcessor):
            yield "head", name, module.__dict__.get("_apply_head") is shared_head
        elif isinstance(module, MoERunner):
            # what records gate weights is wrapped around the routing
            router: Any = module.router
            routing = _partial_of(inspect.unwrap(router._compute_routing), shared_routing)
            for cause in ("top_k", "gate_normalization"):
                yield cause, f"{name}.router", routing is not None and cause in routing.args[1]
        elif isinstance(module, Attention):
            yield "attention", name, isinstance(module.impl, attention_class(device))
        yield from _products(name, module, device)
    if device.type == "cuda":
        for cause in SAMPLER_CAUSES:
            yield cause, "sampler", not vllm_config.use_v2_model_runner or is_live(cause)


def _partial_of(method: Any, function: Any) -> partial | None:
    return method if isinstance(method, partial) and method.func is function else None


def _norm(name: str, module: Any) -> Iterator[tuple[str, str, bool]]:
    leaf, method = name.rpartition(".")[2], _partial_of(module._forward_method, shared_norm)
    yield NORM_CAUSES.get(leaf, "rms_norm"), name, method is not None and method.args[2]
    if NORM_CAUSES.get(leaf) != "qk_norm":
        yield "residual_add", name, method is not None and method.args[3]


def _products(name: str, module: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, str, bool]]:
    """Quantizers, router and experts."""
    method: Any = getattr(module, "quant_method", None)
    if method is None:
        return
    if name.endswith(".mlp.gate"):
        # on the CPU a class of our own, on a GPU a replaced method
        yield "router_gemm", name, bool(getattr(method, "shared", False)) or "apply" in method.__dict__
    if hasattr(module, "w13_weight"):
        operators = getattr(method, "operators", None)
        shared: Any = getattr(operators, "shared", ())
        if device.type == "cpu":
            shared = {cause for cause in ("swiglu", "combine") if getattr(operators, f"shared_{cause}", False)}
        for cause in ("swiglu", "combine", *(["activation_scales"] if device.type == "cuda" else [])):
            yield cause, name, cause in shared
    kernel = getattr(method, "fp8_linear", None)
    if kernel is not None and device.type == "cuda":
        from e2e_fp8.rollout.cuda_fp8 import shared_quantizer

        quantizer = getattr(kernel, "quant_fp8", None)
        yield "activation_scales", name, _partial_of(getattr(quantizer, "_forward_method", None), shared_quantizer) is not None
