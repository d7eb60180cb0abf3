"""Policy objective: advantage estimator, policy loss, aggregation, KL and entropy terms. Formulas: docs/formulas.md."""

from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from e2e_fp8.config.base import Section
from e2e_fp8.config.critic import CriticConfig

Kind = Literal["grpo", "dr_grpo", "dapo", "ppo", "gspo", "gspo_token", "sapo", "cispo", "dppo_tv", "dppo_kl"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"clip_high": 0.2, "normalize_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "dapo": {"dynamic_sampling": True},
    "ppo": {"clip_high": 0.2, "dual_clip": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    "gspo_token": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    "sapo": {"loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    "dppo_tv": {"divergence_low": 0.15, "divergence_high": 0.15},
    "dppo_kl": {"divergence_low": 0.05, "divergence_high": 0.05},
}
"""Fields that an objective sets where the file does not; the others keep the defaults of the fields themselves, which are GRPO's."""


class CalibrationConfig(Section):
    """Calibrated clipping: FP8 clip ranges that hold back as many tokens as BF16 ratios would (docs/formulas.md)."""

    interval: int = Field(default=0, ge=0, description="Optimizer steps between two shadow passes; 0 for none (the paper's is 20).")
    ranges: Literal["low", "both"] = Field(
        default="both", description="low: clip_low alone moves; both: clip_high is scaled by the same factor, the paper's rebalancing."
    )
    min_factor: float = Field(default=0.2, gt=0, le=1, description="Least share of the configured range that one in use may be.")
    max_factor: float = Field(default=5.0, ge=1, description="Most times the configured range that one in use may be.")


class ObjectiveConfig(Section):
    """Policy objective. ``kind`` fills the fields that the file leaves out (table in docs/formulas.md); explicit ones stay."""

    kind: Kind = Field(
        default="grpo",
        validation_alias=AliasChoices("kind", "name"),
        description="Policy loss and the defaults that go with it. ppo is the clipped loss with dual clip; with advantage gae it is PPO.",
    )
    advantage: Literal["group", "gae"] = Field(
        default="group", description="Group-relative advantages, or generalised advantage estimation with the value model of critic."
    )
    critic: CriticConfig = Field(default=CriticConfig(), description="Value model; read with advantage gae alone.")
    clip_low: float = Field(default=0.2, gt=0, le=1, description="Lower clip range: ratio >= 1 - clip_low; at 1 nothing is clipped below.")
    clip_high: float = Field(default=0.28, gt=0, description="Upper clip range: ratio <= 1 + clip_high (DAPO clip-higher).")
    calibration: CalibrationConfig = Field(default=CalibrationConfig(), description="Calibrated clipping.")
    dual_clip: float | None = Field(
        default=None, description="Largest ratio c > 1 that counts for a negative advantage (dual-clip PPO); None for no bound."
    )
    tau_pos: float = Field(default=1.0, gt=0, description="SAPO's temperature for a positive advantage.")
    tau_neg: float = Field(default=1.05, gt=0, description="SAPO's temperature for the others.")
    divergence_low: float = Field(default=0.15, gt=0, description="DPPO: largest divergence of a token that is made less probable.")
    divergence_high: float = Field(default=0.15, gt=0, description="DPPO: largest divergence of a token that is made more probable.")
    loss_agg_mode: Aggregation = Field(
        default="token-mean",
        description="token-mean: sum over all tokens over their count. seq-mean-*: mean over sequences of each one's token mean, token "
        "sum, or token sum over loss_norm_tokens.",
    )
    loss_norm_tokens: int | None = Field(
        default=None, description="Constant divisor of seq-mean-token-sum-norm; None takes rollout.max_response_tokens."
    )
    normalize_by_std: bool = Field(default=True, description="Divide group-relative rewards by their standard deviation (advantage group).")
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to that standard deviation.")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the frozen reference policy; 0 keeps no reference.")
    reference_precision: Literal["fp8", "bf16"] | None = Field(
        default=None, description="Linear layers of the reference policy: block FP8 or BF16; None takes numerics.training_precision."
    )
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3", description="Schulman's estimator; with + its value has the gradient of k2, which is the KL's own in expectation."
    )
    kl_placement: Literal["loss", "reward"] = Field(default="loss", description="KL as a term of the loss, or taken off the reward.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    overlong_buffer_tokens: int = Field(
        default=0, ge=0, description="DAPO's soft punishment starts this many tokens below rollout.max_response_tokens; 0 for none."
    )
    overlong_penalty: float = Field(default=1.0, ge=0, description="Punishment of a response at the length limit.")
    dynamic_sampling: bool = Field(
        default=False, description="Drop groups whose rewards are all equal and sample other prompts instead (DAPO)."
    )
    dynamic_sampling_rounds: int = Field(
        default=4, ge=1, description="Rollout rounds of one step at most; each samples rollout.prompts_per_step prompts."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values.get("kind", values.get("name", "grpo"))
        return {**KIND_DEFAULTS.get(kind, {}), **values} if isinstance(kind, str) else values
