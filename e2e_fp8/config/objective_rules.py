"""Rules between the objective, the correction and the rest, checked when a configuration is parsed. Torch-free."""

from typing import TYPE_CHECKING

from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config

_RATIO_CLIPPED = ("grpo", "dr_grpo", "dapo", "ppo")
_SEQUENCE_CLIPPED = ("gspo", "gspo_token")


def check_objective(cfg: "Config") -> None:
    """Raise ConfigError for the first rule of the objective that ``cfg`` breaks."""
    o, limit = cfg.objective, cfg.rollout.max_response_tokens
    _check_advantage(cfg)
    if o.dual_clip is not None and o.kind not in (*_RATIO_CLIPPED, *_SEQUENCE_CLIPPED):
        raise ConfigError(f"objective.dual_clip is {o.dual_clip}, but objective.kind {o.kind} has no clipped ratio: remove it.")
    if o.dual_clip is not None and o.dual_clip <= 1 + o.clip_high:
        raise ConfigError(
            f"objective.dual_clip is {o.dual_clip}, but must be above 1 + objective.clip_high = {1 + o.clip_high:g}: use for example 3, or "
            "null for none."
        )
    if o.loss_norm_tokens is not None and o.loss_norm_tokens < 1:
        raise ConfigError(f"objective.loss_norm_tokens is {o.loss_norm_tokens}, but divides the loss: use 1 or more, or null.")
    if o.loss_norm_tokens is not None and o.loss_agg_mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"objective.loss_norm_tokens is {o.loss_norm_tokens}, but objective.loss_agg_mode {o.loss_agg_mode} does not divide by it: "
            "remove it, or use seq-mean-token-sum-norm."
        )
    if o.overlong_buffer_tokens >= limit:
        raise ConfigError(
            f"objective.overlong_buffer_tokens is {o.overlong_buffer_tokens}, but rollout.max_response_tokens is {limit}: the punishment "
            "starts within the response, so lower the first or raise the second."
        )
    if o.reference_precision is not None and not o.kl_coef:
        raise ConfigError(
            f"objective.reference_precision is {o.reference_precision}, but objective.kl_coef is 0, which keeps no reference: raise it "
            "or remove the field."
        )
    if o.kl_placement == "reward" and o.kl_estimator.endswith("+"):
        raise ConfigError(
            f"objective.kl_estimator is {o.kl_estimator}, but objective.kl_placement is reward, through which no gradient goes: use "
            f"{o.kl_estimator[:-1]}."
        )


def check_calibration(cfg: "Config") -> None:
    """Raise ConfigError where calibrated clipping has nothing to compare or nothing to move."""
    o, c = cfg.objective, cfg.objective.calibration
    if not c.interval:
        return
    on = f"objective.calibration.interval is {c.interval}"
    if o.kind not in (*_RATIO_CLIPPED, *_SEQUENCE_CLIPPED):
        raise ConfigError(f"{on}, but objective.kind {o.kind} has no clipped ratio with a lower bound for A < 0: set interval to 0.")
    if cfg.numerics.training_precision != "fp8":
        raise ConfigError(f"{on}, but numerics.training_precision is bf16: the shadow pass would repeat the trainer's own. Set it to 0.")
    if cfg.correction.bypass_mode:
        raise ConfigError(
            f"{on}, but correction.bypass_mode is true: the shadow ratio needs the trainer's own old log-probs, so set one of them to 0 or "
            "false."
        )
    if cfg.training.minibatches_per_step < 2:
        raise ConfigError(
            f"{on}, but training.minibatches_per_step is 1: the only optimizer step of a batch has ratio 1 at every token and clips "
            "nothing, so raise minibatches_per_step or set interval to 0."
        )
    highest = 1 + o.clip_high * c.max_factor
    if c.ranges == "both" and o.dual_clip is not None and o.dual_clip <= highest:
        raise ConfigError(
            f"objective.dual_clip is {o.dual_clip}, but objective.calibration may move the upper bound to 1 + clip_high x max_factor = "
            f"{highest:g}: lower objective.calibration.max_factor, or raise dual_clip."
        )


def _check_advantage(cfg: "Config") -> None:
    """Rules of group-relative advantages and of the critic."""
    o, size = cfg.objective, cfg.rollout.group_size
    if o.advantage == "group":
        if size < 2:
            raise ConfigError(
                f"rollout.group_size is {size}, but objective.advantage is group and one sample has no group to be compared with: use 2 or "
                "more, or advantage gae."
            )
        if o.critic != type(o.critic)():
            raise ConfigError("objective.critic is set, but objective.advantage is group, which has no critic: use gae, or remove it.")
        return
    if o.dynamic_sampling:
        raise ConfigError(
            "objective.dynamic_sampling is true, but objective.advantage is gae, with which groups of equal rewards have a learning signal "
            "too: set dynamic_sampling to false, or advantage to group."
        )
    if o.kind == "gspo":
        raise ConfigError(
            "objective.kind is gspo, which has one ratio and one advantage a sequence, but objective.advantage is gae, one advantage a "
            "token: use gspo_token, or advantage group."
        )


def check_correction(cfg: "Config") -> None:
    """Raise ConfigError for the first rule of the correction that ``cfg`` breaks."""
    c, kind = cfg.correction, cfg.objective.kind
    if c.loss_type == "reinforce" and not c.bypass_mode:
        raise ConfigError(
            "correction.loss_type is reinforce, but correction.bypass_mode is false, in which the objective has its ratio: set bypass_mode "
            "to true, or loss_type to ppo_clip."
        )
    if c.loss_type == "reinforce" and kind not in _RATIO_CLIPPED:
        raise ConfigError(
            f"correction.loss_type is reinforce, which replaces the clipped ratio, but objective.kind is {kind}: use one of "
            f"{', '.join(_RATIO_CLIPPED)}."
        )
    if c.bypass_mode and c.loss_type == "ppo_clip" and c.rollout_is is not None:
        raise ConfigError(
            f"correction.rollout_is is {c.rollout_is}, but correction.bypass_mode is true and the loss's ratio is already against the "
            "rollout policy: set rollout_is to null, or loss_type to reinforce."
        )
    if c.rollout_is_batch_normalize and c.rollout_is is None:
        raise ConfigError("correction.rollout_is_batch_normalize is true, but correction.rollout_is is null: without weights, unset it.")
    if c.rollout_rs is None and c.rollout_rs_threshold is not None:
        raise ConfigError(
            f"correction.rollout_rs_threshold is {c.rollout_rs_threshold!r}, but correction.rollout_rs is null: name the rejections, or "
            "remove the bound."
        )
