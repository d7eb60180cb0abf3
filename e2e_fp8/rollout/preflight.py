"""Checks of an engine in this process before it is used: plugin live, and plan and switches as the trainer's."""

from importlib.metadata import entry_points
from typing import Any

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.errors import EngineError
from e2e_fp8.rollout.agreement import check_agreement, worker_facts


def verify_plugin_live() -> None:
    """Load vLLM's plugins and raise EngineError unless everything :func:`e2e_fp8.rollout.plugin.register` adds is there.

    vLLM logs a plugin that failed and carries on without it.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from e2e_fp8.rollout.weight_transfer import BACKEND

    if "e2e_fp8" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise EngineError("vLLM plugin e2e_fp8 is not installed in this environment: install the project (pip install -e .).")
    load_general_plugins()
    missing = [] if BACKEND in WeightTransferEngineFactory._registry else [f"weight transfer engine {BACKEND}"]
    if current_platform.is_cpu():
        from e2e_fp8.rollout import cpu_fp8

        missing += cpu_fp8.missing_registrations()
    if missing:
        raise EngineError(
            f"vLLM did not load plugin e2e_fp8: {', '.join(missing)} not registered. Check VLLM_PLUGINS and vLLM's log for the "
            "plugin's own error."
        )


def verify_agreement(llm: Any, cfg: Config, device: torch.device) -> None:
    """Compare what the live model of ``llm`` computes with and what ``cfg`` plans; raises as :func:`check_agreement`."""
    check_agreement(cfg, llm.apply_model(lambda model: worker_facts(model, llm.llm_engine.vllm_config, device)))
