"""What router replay needs of the model and of the engine, checked when a configuration is parsed. Torch-free."""

from typing import TYPE_CHECKING

from e2e_fp8.config.alignment import MOE_CAUSES, choices_of
from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config


def check_router_replay(cfg: "Config") -> None:
    """Raise ConfigError for the first rule of router replay that ``cfg`` breaks."""
    mode, model = cfg.training.router_replay.mode, cfg.model
    if not cfg.training.router_replay.enabled:
        return
    field = f"training.router_replay.mode is {mode}"
    if not model.is_moe:
        raise ConfigError(f"{field}, but {model.architecture} has no router: set it to disabled.")
    if not cfg.rollout.capture_routed_experts:
        raise ConfigError(
            f"{field}, but rollout.capture_routed_experts is false and the engine returns no routing: set that field to true, or "
            "the mode to disabled."
        )
    if model.num_experts_per_tok == 1:
        raise ConfigError(
            f"{field}, but model.num_experts_per_tok is 1: the engine marks what it did not record with zeros, which cannot be told from "
            "expert 0 then. Set the mode to disabled."
        )
    choices = choices_of(cfg.numerics)
    shared = [name for name in MOE_CAUSES if choices[name] != "native"]
    if mode == "R3_weights_order" and shared and choices["combine"] == "native":
        raise ConfigError(
            f"{field}, but numerics.alignment shares {shared[0]} with the engine and not combine, and outputs are then not added in the "
            "order of the engine's slots: set numerics.alignment_overrides.combine to shared, or the mode to R3."
        )
    if cfg.rollout.placement == "server" and cfg.run.backend == "cpu" and cfg.numerics.rollout_precision == "bf16":
        raise ConfigError(
            f"{field}, but vLLM's unquantized experts on a CPU record their routing in the trainer's process only: set "
            "rollout.placement to in_process, or numerics.rollout_precision to fp8."
        )
