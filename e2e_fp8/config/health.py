"""Thresholds of the health monitors."""

from pydantic import Field

from e2e_fp8.config.base import Section


class HealthConfig(Section):
    """Alarms over the metrics of a run; null switches a monitor off. An alarm is a line of advice, it never changes or stops a run."""

    window: int = Field(default=5, ge=1, description="RL steps over which noisy metrics are averaged before they meet a threshold.")
    version_gap: float | None = Field(
        default=0.0, ge=0, description="Alarm when a trained sample came from weights more than this many optimizer steps old."
    )
    reward_hacking: float | None = Field(
        default=0.25,
        gt=0,
        description="Alarm when, since the best evaluation, held-out reward fell and train reward rose, both by more than this many "
        "standard deviations of the training rewards.",
    )
    kl_budget: float | None = Field(
        default=20.0,
        gt=0,
        description="Alarm above this KL to the start in nats per response (5 to 15 are normal); measured only with objective.kl_coef "
        "above 0, as a reference policy is needed.",
    )
    prefix_cache_drop: float | None = Field(
        default=0.5, gt=0, lt=1, description="Alarm when the engine's prefix-cache hit rate falls below this share of its best in the run."
    )
    advantage_dilution: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Alarm when the mean |advantage| of the longer half of the responses is below this share of the shorter half's.",
    )
    degenerate_groups: float | None = Field(
        default=0.7, gt=0, lt=1, description="Alarm when more than this share of groups has equal rewards, so no learning signal."
    )
    entropy_collapse: float | None = Field(
        default=0.2, gt=0, lt=1, description="Alarm when entropy is below this share of its level at the start of RL."
    )
    blind_critic: float | None = Field(
        default=0.0,
        gt=-1,
        lt=1,
        description="Alarm when the critic's values explain less than this share of the variance of the returns, from the third window on.",
    )
    ratio_tails: float | None = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="Alarm when more than this share of tokens has p_train / p_rollout outside [1/C, C], C being "
        "correction.rollout_is_threshold.",
    )
    old_log_probs_audit: float | None = Field(
        default=0.0,
        ge=0,
        description="Alarm when more than this many audited sequences of a step have other log-probs in the trainer than in the engine; "
        "measured only with training.old_log_probs rollout.",
    )
    memory_imbalance: float | None = Field(
        default=1.25, gt=1, description="Alarm when a rank of trainer or server uses more than this many times the ranks' mean."
    )
    memory_growth: float | None = Field(
        default=0.3, gt=0, description="Alarm when a process has grown by more than this share since the second window of steps (a leak)."
    )
    memory_full: float | None = Field(
        default=0.95, gt=0, lt=1, description="Alarm when more than this share of host or device memory is in use."
    )
    tile_saturation: float | None = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Alarm when more than this share of an operand's FP8 codes is the largest magnitude; a 1x128 tile has at least 1/128.",
    )
