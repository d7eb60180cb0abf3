"""Models of the trainer beside the policy: the critic and the frozen reference. Torch-free."""

from typing import TYPE_CHECKING

from e2e_fp8.config.critic import critic_config

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config


def reference_config(cfg: "Config") -> "Config":
    """The run's configuration as the reference policy reads it: its own precision."""
    precision = cfg.objective.reference_precision or cfg.numerics.training_precision
    return cfg.model_copy(update={"numerics": cfg.numerics.model_copy(update={"training_precision": precision})})


def fp8_models(cfg: "Config") -> "list[Config]":
    """Configurations of the policy, the critic and the reference, of those that exist and run their linear layers in FP8."""
    found = [cfg]
    found += [critic_config(cfg)] if cfg.objective.advantage == "gae" else []
    found += [reference_config(cfg)] if cfg.objective.kl_coef > 0 else []
    return [one for one in found if one.numerics.training_precision == "fp8"]
