"""What taking the engine's log-probs for the trainer's own needs, checked when a configuration is parsed. Torch-free."""

from typing import TYPE_CHECKING

from e2e_fp8.config.alignment import CAUSES
from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config


def check_old_log_probs(cfg: "Config") -> None:
    """Raise ConfigError for the first rule of ``training.old_log_probs`` that ``cfg`` breaks."""
    training, numerics, correction = cfg.training, cfg.numerics, cfg.correction
    if training.old_log_probs == "recompute":
        audit, default = training.old_log_probs_audit, type(training).model_fields["old_log_probs_audit"].default
        if audit != default:
            raise ConfigError(
                f"training.old_log_probs_audit is {audit}, but training.old_log_probs is recompute and every sequence is computed: set "
                "that to rollout, or remove the audit."
            )
        return
    field = "training.old_log_probs is rollout"
    if numerics.alignment != "bitwise":
        raise ConfigError(
            f"{field}, but numerics.alignment is {numerics.alignment}, with which the engine's log-probs are not the trainer's: set "
            "training.old_log_probs to recompute, or numerics.alignment to bitwise."
        )
    opened = [name for name, choice in numerics.alignment_overrides.items() if choice != CAUSES[name].at("bitwise")]
    if opened:
        raise ConfigError(
            f"{field}, but numerics.alignment_overrides.{opened[0]} is {numerics.alignment_overrides[opened[0]]}, which lets the two sides "
            "differ: remove the override, or set training.old_log_probs to recompute."
        )
    if correction.bypass_mode and not correction.corrects:
        raise ConfigError(
            f"{field}, but correction.bypass_mode is true without weights or rejections, so that no log-probs are computed before an "
            "update and none can be saved: set training.old_log_probs to recompute."
        )
