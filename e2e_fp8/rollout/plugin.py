"""Entry point of vLLM's plugin system (group ``vllm.general_plugins``).

vLLM swallows errors of plugins and goes on without them: :mod:`e2e_fp8.rollout.preflight` turns that into an error.
"""

import os


def register() -> None:
    """Register weight-transfer engines, paused calls, shared loader and router gate, and on the CPU the block-FP8 W8A8 kernels. May be
    called again.

    Where ``E2E_FP8_CAPTURE_GATE_WEIGHTS`` is 1, vLLM's record of expert ids takes gate weights as well.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from e2e_fp8.rollout.paused_call import register_paused_call
    from e2e_fp8.rollout.router_gate import register_router_gate
    from e2e_fp8.rollout.shared_loader import register_shared_loader
    from e2e_fp8.rollout.weight_transfer import BACKEND, REMOTE_BACKEND

    register_paused_call()
    register_shared_loader()
    register_router_gate()
    if REMOTE_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(REMOTE_BACKEND, "e2e_fp8.rollout.remote_transfer", "RemoteWeightTransferEngine")
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "e2e_fp8.rollout.weight_transfer", "LocalWeightTransferEngine")
    if current_platform.is_cpu():
        from e2e_fp8.rollout.cpu_fp8 import register_cpu_fp8

        register_cpu_fp8()
    from e2e_fp8.rollout.environment import CAPTURE_GATE_WEIGHTS

    if os.environ.get(CAPTURE_GATE_WEIGHTS) == "1":
        from e2e_fp8.rollout.gate_weights import record_gate_weights

        record_gate_weights()
