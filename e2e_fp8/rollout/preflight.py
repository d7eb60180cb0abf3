"""Proof that the plugin is live in this process, because vLLM logs a failed plugin and carries on."""

from importlib.metadata import entry_points

from e2e_fp8.errors import EngineError


def verify_plugin_live() -> None:
    """Load vLLM's plugins and raise EngineError unless everything :func:`e2e_fp8.rollout.plugin.register` adds is there."""
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
