"""Configuration to loss function."""

import torch

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.protocols import LossFn
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.aggregation import aggregated_sum, token_sum
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.policy_loss import (
    TokenLoss,
    cispo_loss,
    clipped_ratio_loss,
    dppo_loss,
    sapo_loss,
    score_function_loss,
    sequence_log_ratio,
    sequence_token_log_ratio,
)

TRAINED_TOKENS = "tokens/trained"
"""Metric sum by which the token metrics are divided; the loss has the aggregation's own denominator."""


def make_loss_fn(objective: ObjectiveConfig, correction: CorrectionConfig, *, max_response_tokens: int = 1) -> LossFn:
    """The configured objective: aggregated sum over the trained mask of ``w_t L_t + kl_coef KL_t - entropy_coef H_t``.

    The importance weights of the batch multiply the policy loss alone, as in verl. Metric sums over trained tokens:
    ``tokens/trained``, ``clip_fraction/{low,high}``, ``clip_fraction/dual`` with a dual clip, ``ratio/mean``, and ``kl_ref`` when a KL is
    in the loss; ``loss`` is the sum itself. ``max_response_tokens`` is the norm of seq-mean-token-sum-norm unless the objective gives one.

    Raises, when called:
        ValueError: a KL is in the loss and the batch has no ``ref_log_probs``.
    """
    norm = float(objective.loss_norm_tokens or max_response_tokens)
    kl_in_loss = objective.kl_coef > 0 and objective.kl_placement == "loss"

    def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch.trained_mask
        sequences = Sequences.of(mask, batch.cu_seqlens)
        policy, log_ratio = _policy_loss(objective, correction, stats, batch, sequences)
        metrics = {
            TRAINED_TOKENS: mask.sum(),
            "clip_fraction/low": token_sum(policy.low, mask),
            "clip_fraction/high": token_sum(policy.high, mask),
            "ratio/mean": token_sum(log_ratio.detach().exp(), mask),
        }
        if objective.dual_clip is not None:
            metrics["clip_fraction/dual"] = token_sum(policy.dual, mask)
        loss = policy.loss
        if batch.importance_weights is not None:
            # a rejected token's weight may be anything, and a sequence's ratio carries gradients from one token to the others
            loss = loss * torch.where(mask > 0, batch.importance_weights, torch.ones_like(mask))
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * stats.entropy
        if kl_in_loss:
            if batch.ref_log_probs is None:
                raise ValueError("objective.kl_coef is set but the batch has no ref_log_probs")
            kl = kl_estimate(safe_log_ratio(batch.ref_log_probs, stats.log_probs, mask), objective.kl_estimator)
            metrics["kl_ref"] = token_sum(kl.detach(), mask)
            loss = loss + objective.kl_coef * kl
        total = aggregated_sum(loss, sequences, objective.loss_agg_mode, norm)
        metrics["loss"] = total.detach()
        return total, metrics

    return loss_fn


def _policy_loss(
    objective: ObjectiveConfig, correction: CorrectionConfig, stats: TokenStats, batch: PackedBatch, sequences: Sequences
) -> tuple[TokenLoss, torch.Tensor]:
    """Token losses and the log ratio of the objective, per token or per sequence."""
    mask = batch.trained_mask
    log_ratio = safe_log_ratio(stats.log_probs, batch.old_log_probs, mask)
    # masked positions may hold anything, and nothing of it may meet a gradient
    log_probs, old, advantages = (
        torch.where(mask > 0, values, torch.zeros_like(values)) for values in (stats.log_probs, batch.old_log_probs, batch.advantages)
    )
    kind, low, high = objective.kind, objective.clip_low, objective.clip_high
    if correction.loss_type == "reinforce":
        zero = torch.zeros_like(mask)
        ones = torch.ones_like(log_probs)
        return TokenLoss(loss=score_function_loss(ones, log_probs, advantages), low=zero, high=zero, dual=zero), log_ratio
    if kind == "cispo":
        return cispo_loss(log_ratio, log_probs, advantages, clip_low=low, clip_high=high), log_ratio
    if kind == "sapo":
        return sapo_loss(log_ratio, advantages, tau_pos=objective.tau_pos, tau_neg=objective.tau_neg), log_ratio
    if kind in ("dppo_tv", "dppo_kl"):
        bounds = {"divergence": kind.removeprefix("dppo_"), "low": objective.divergence_low, "high": objective.divergence_high}
        return dppo_loss(log_ratio, log_probs, old, advantages, **bounds), log_ratio
    if kind == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, sequences)
    elif kind == "gspo_token":
        log_ratio = sequence_token_log_ratio(log_ratio, sequences)
    return clipped_ratio_loss(log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=objective.dual_clip), log_ratio


def supervised_loss_fn() -> LossFn:
    """Negative log-likelihood of the targets, summed over the loss mask."""

    def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -token_sum(stats.log_probs, batch.loss_mask)
        return loss, {"loss": loss.detach()}

    return loss_fn
