"""Routed-experts capture for the unquantized mixture of experts on the CPU.

vLLM records a token's experts inside its router, which that method bypasses: it routes inside its kernel call. The same
routing function is applied to the same router logits here, and the result given to the same recorder.
"""

import torch

from e2e_fp8.errors import EngineError


def capture_unquantized_cpu_routing(model: torch.nn.Module) -> None:
    """Make every monolithic unquantized MoE layer of ``model`` report its choices to vLLM's recorder."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from e2e_fp8.rollout.gate_weights import WEIGHT_RECORDER

    for module in model.modules():
        if not isinstance(module, MoERunner) or not module.routed_experts.quant_method.is_monolithic:
            continue
        inner, router = module.routed_experts.quant_method.apply_monolithic, module.router
        if not isinstance(router, BaseRouter) or router.capture_fn is None:
            raise EngineError("vLLM bound no recorder of routed experts to a router; set rollout.capture_routed_experts to false.")
        capture, record_weights = router.capture_fn, getattr(router, WEIGHT_RECORDER, None)

        def apply_monolithic(layer, x, router_logits, input_ids=None, *, inner=inner, capture=capture, record_weights=record_weights):
            topk_weights, topk_ids = select_experts(
                hidden_states=x,
                router_logits=router_logits,
                top_k=layer.top_k,
                use_grouped_topk=layer.use_grouped_topk,
                renormalize=layer.renormalize,
                scoring_func=layer.scoring_func,
            )
            capture(topk_ids)
            if record_weights is not None:
                record_weights(topk_weights)
            return inner(layer, x, router_logits, input_ids)

        module.routed_experts.quant_method.apply_monolithic = apply_monolithic
