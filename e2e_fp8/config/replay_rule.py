"""What router replay needs of the model and of the engine, checked when a configuration is parsed. Torch-free."""

from typing import TYPE_CHECKING

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
    if cfg.rollout.placement == "server" and cfg.run.backend == "cpu" and cfg.numerics.rollout_precision == "bf16":
        raise ConfigError(
            f"{field}, but vLLM's unquantized experts on a CPU record their routing in the trainer's process only: set "
            "rollout.placement to in_process, or numerics.rollout_precision to fp8."
        )
