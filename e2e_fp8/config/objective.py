"""Policy objective and rollout correction."""

from typing import Literal

from pydantic import Field

from e2e_fp8.config.base import Section


class ObjectiveConfig(Section):
    """GRPO with clip-higher and token-mean aggregation."""

    name: Literal["grpo"] = Field(default="grpo", description="Advantage estimator and policy loss.")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="Lower clip range: ratio >= 1 - clip_low.")
    clip_high: float = Field(default=0.28, gt=0, description="Upper clip range: ratio <= 1 + clip_high (DAPO clip-higher).")
    loss_agg_mode: Literal["token-mean"] = Field(default="token-mean", description="Sum over all tokens of the batch over their count.")
    normalize_by_std: bool = Field(default=True, description="Divide group-relative rewards by their standard deviation.")
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation.")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the k3 KL to the frozen reference policy; 0 keeps no reference.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")


class CorrectionConfig(Section):
    """Importance weights between the rollout policy and the trainer's old policy."""

    rollout_is_level: Literal["token"] | None = Field(
        default="token", description="Truncated importance sampling per token, or None for no correction."
    )
    rollout_is_threshold: float = Field(default=2.0, gt=0, description="Upper bound C of the truncated weight (TIS).")
