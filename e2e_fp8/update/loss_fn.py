"""Configuration to loss function."""

import torch

from e2e_fp8.config.objective import CorrectionConfig, ObjectiveConfig
from e2e_fp8.correction.importance import safe_log_ratio, token_truncated_weights
from e2e_fp8.protocols import LossFn
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.aggregation import token_sum
from e2e_fp8.update.policy_loss import grpo_token_loss, k3_kl


def make_loss_fn(objective: ObjectiveConfig, correction: CorrectionConfig) -> LossFn:
    """GRPO with the configured correction: ``sum_t(w_t L_t + kl_coef k3_t - entropy_coef H_t)`` over the trained tokens.

    The importance weight multiplies the policy loss alone, as in verl. Metric sums, to be divided by the token count: ``loss``,
    ``clip_fraction/{low,high}``, ``ratio/mean``, and ``kl_ref`` when ``kl_coef`` is not 0.

    Raises, when called:
        ValueError: ``kl_coef`` is not 0 and the batch has no ``ref_log_probs``.
    """

    def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch.loss_mask
        log_ratio = safe_log_ratio(stats.log_probs, batch.old_log_probs, mask)
        loss, low, high = grpo_token_loss(log_ratio, batch.advantages, clip_low=objective.clip_low, clip_high=objective.clip_high)
        metrics = {"clip_fraction/low": token_sum(low, mask), "clip_fraction/high": token_sum(high, mask)}
        metrics["ratio/mean"] = token_sum(log_ratio.detach().exp(), mask)
        if correction.rollout_is_level is not None:
            weights = token_truncated_weights(batch.old_log_probs, batch.rollout_log_probs, mask, correction.rollout_is_threshold)
            loss = loss * weights.weights
        total = token_sum(loss, mask)
        if objective.entropy_coef:
            total = total - objective.entropy_coef * token_sum(stats.entropy, mask)
        if objective.kl_coef:
            if batch.ref_log_probs is None:
                raise ValueError("objective.kl_coef is set but the batch has no ref_log_probs")
            kl = token_sum(k3_kl(safe_log_ratio(batch.ref_log_probs, stats.log_probs, mask)), mask)
            metrics["kl_ref"] = kl.detach()
            total = total + objective.kl_coef * kl
        metrics["loss"] = total.detach()
        return total, metrics

    return loss_fn


def supervised_loss_fn() -> LossFn:
    """Negative log-likelihood of the targets, summed over the loss mask."""

    def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -token_sum(stats.log_probs, batch.loss_mask)
        return loss, {"loss": loss.detach()}

    return loss_fn
