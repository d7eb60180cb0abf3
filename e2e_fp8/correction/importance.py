"""Importance weights between the trainer's old policy and the rollout policy.

Truncated importance sampling, token level (TIS): w_t = min(exp(lp_old_t - lp_rollout_t), C), detached, multiplies the policy
loss. The log ratio is clamped to +-20 before the exponential, as verl does. Legend: T packed tokens.
"""

from dataclasses import dataclass

import torch

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Weights and what was cut."""

    weights: torch.Tensor
    """float32 ``[T]``, detached; 1 outside the loss mask."""
    truncated: torch.Tensor
    """float32 ``[T]``: 1 where the bound was active on a trained token."""


def log_ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """``numerator - denominator`` on trained tokens, 0 elsewhere.

    Two equal infinities give 0; a nan on a trained token is kept, so that it is seen and not hidden.

    Raises:
        ValueError: shapes differ.
    """
    if not numerator_T.shape == denominator_T.shape == loss_mask_T.shape:
        raise ValueError(f"shapes differ: {tuple(numerator_T.shape)}, {tuple(denominator_T.shape)}, {tuple(loss_mask_T.shape)}")
    trained = loss_mask_T > 0
    numerator = torch.where(trained, numerator_T, torch.zeros_like(numerator_T))
    denominator = torch.where(trained, denominator_T, torch.zeros_like(denominator_T))
    # only for equal infinities: a finite log ratio of exactly 0, the on-policy case, must keep its gradient
    both_infinite = torch.isinf(numerator) & (numerator == denominator)
    return torch.where(both_infinite, torch.zeros_like(numerator), numerator - denominator)


def safe_log_ratio(numerator_T: torch.Tensor, denominator_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """``log_ratio`` clamped to +-20; no gradient where the clamp acts."""
    return log_ratio(numerator_T, denominator_T, loss_mask_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def token_truncated_weights(
    old_log_probs_T: torch.Tensor, rollout_log_probs_T: torch.Tensor, loss_mask_T: torch.Tensor, threshold: float
) -> RolloutCorrection:
    """Token-level TIS weights with upper bound ``threshold``.

    Raises:
        ValueError: shapes differ or ``threshold`` is not positive.
    """
    if threshold <= 0:
        raise ValueError(f"threshold must be positive, got {threshold}")
    with torch.no_grad():
        trained = loss_mask_T > 0
        ratio = torch.exp(safe_log_ratio(old_log_probs_T, rollout_log_probs_T, loss_mask_T))
        # a bound below 1 must not reach the tokens outside the mask
        weights = torch.where(trained, ratio.clamp_max(threshold), torch.ones_like(ratio))
        return RolloutCorrection(weights=weights, truncated=((ratio > threshold) & trained).float())
