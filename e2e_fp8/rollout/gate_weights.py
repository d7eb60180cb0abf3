"""Gate weights beside expert ids in vLLM's own record of routing.

vLLM keeps expert ids in a buffer by KV-cache slot, so that prefix-cache hits and preempted requests find theirs. Here that record
gets twice as many layers: ids of the L layers, then the FP32 bits of the L layers' gate weights, as 32-bit integers. All that vLLM
does with ids (copies from the device, slots, HTTP) then holds for weights. The plugin does this in every process of vLLM that has
``E2E_FP8_CAPTURE_GATE_WEIGHTS=1`` in its environment, which a run sets when it needs the weights.

Shape legend: ``M`` tokens of an engine step, ``L`` layers, ``k`` slots, ``n`` tokens of a request.
"""

from typing import Any

import numpy
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, RoutedExpertsManager
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.worker import gpu_model_runner

from e2e_fp8.patching import Patch, apply_all
from e2e_fp8.rollout.vllm_patch import vllm_patch

WEIGHT_RECORDER = "e2e_fp8_record_weights"
"""Attribute of a vLLM router: a function that records the FP32 gate weights ``[M, k]`` of its layer."""


class GateWeightCapturer(RoutedExpertsCapturer):
    """The worker's buffer, int32 ``[M, 2 L, k]``."""

    def __init__(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        super().__init__(max_num_batched_tokens, vllm_config)
        self.layers = self.device_buffer.shape[1]
        self.device_buffer = self.device_buffer.repeat(1, 2, 1)

    def record_weights(self, layer_id: int, weights_Mk: torch.Tensor) -> None:
        """Keep the gate weights of a layer beside its ids."""
        self.capture(self.layers + layer_id, weights_Mk.to(torch.float32).contiguous().view(torch.int32))


class GateWeightManager(RoutedExpertsManager):
    """The scheduler's buffer by KV-cache slot, uint32 ``[slots, 2 L, k]``: eight times the bytes of vLLM's for up to 256 experts."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        slots, layers, top_k = self.routed_experts_by_slot.shape
        # Not int32: the scheduler keeps rows of the worker's own buffer, which the next step overwrites, unless the dtype makes it copy.
        self.routed_experts_by_slot = numpy.zeros((slots, 2 * layers, top_k), dtype=numpy.uint32)


_bind_ids = gpu_model_runner.GPUModelRunner._bind_routed_experts_capturer


def bind_ids_and_weights(self: Any, capturer: RoutedExpertsCapturer) -> None:
    """vLLM's binding of the record of ids to every router of the model, and that of weights."""
    _bind_ids(self, capturer)
    assert isinstance(capturer, GateWeightCapturer)
    for module in self.model.modules():
        if isinstance(module, MoERunner) and isinstance(module.router, BaseRouter):
            _record_weights_of(module.router, module.layer_id, capturer)


def _record_weights_of(router: Any, layer_id: int, capturer: GateWeightCapturer) -> None:
    inner = router._compute_routing

    def record(weights_Mk: torch.Tensor) -> None:
        capturer.record_weights(layer_id, weights_Mk)

    def compute_routing(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights_Mk, ids_Mk = inner(*args, **kwargs)
        record(weights_Mk)
        return weights_Mk, ids_Mk

    compute_routing.__wrapped__ = inner  # type: ignore[attr-defined]
    router._compute_routing = compute_routing
    setattr(router, WEIGHT_RECORDER, record)


def _patch(name: str, target: str, source_sha256: str, replacement: Any) -> Patch:
    return vllm_patch(
        name=name,
        target=target,
        reason="vLLM records expert ids without their gate weights, which router replay in the mode R3_weights_order needs.",
        upstream="not filed; vllm/model_executor/layers/fused_moe/routed_experts_capturer.py",
        remove_when="vLLM returns gate weights beside routed_experts",
        source_sha256=source_sha256,
        replacement=replacement,
    )


def record_gate_weights() -> None:
    """Put the wider record in place of vLLM's in this process. Safe to call more than once.

    Raises:
        ConfigError: this vLLM is not the one that the replacements were written against.
    """
    apply_all(
        (
            _patch(
                "routed_experts_capturer",
                "vllm.v1.worker.gpu_model_runner:RoutedExpertsCapturer",
                "8a5871016aa42963730f688891febea693b8b581da6b4ad280311e0c02e35b78",
                GateWeightCapturer,
            ),
            _patch(
                "routed_experts_manager",
                "vllm.v1.core.sched.scheduler:RoutedExpertsManager",
                "7e6c10f62b211fd068c12561e85e49363cde6212204976ee0faed5a10569c628",
                GateWeightManager,
            ),
            _patch(
                "bind_routed_experts_capturer",
                "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bind_routed_experts_capturer",
                "94bd175142e7d7695e5d9bffd575ea7b35b6d8c1fbd920f38981d8711b93f84c",
                bind_ids_and_weights,
            ),
        )
    )
