"""Importance weights of the rollout policy: p_train / p_rollout, bounded. Legend: T packed tokens.

One function, of which the published corrections are cases: TIS (``truncate``), per token or per sequence; clip to both bounds;
IcePop (``mask`` with two bounds); MIS (``mask`` with an upper one). Weights are detached and multiply the policy loss. Log ratios
are clamped to +-20 before the exponential, as in verl, a sequence's after the sum. What a weight of 0 takes out of the loss stays in
its denominator; what a rejection (``correction.rejection``) takes out does not.
"""

from dataclasses import dataclass

import torch

from e2e_fp8.correction.sequences import Sequences

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Weights and what was cut."""

    weights: torch.Tensor
    """``[T]``, detached; 1 outside the loss mask."""
    ratio: torch.Tensor
    """``[T]``: the weights before the bounds."""
    out_of_bounds: torch.Tensor
    """``[T]``: 1 on trained tokens whose ratio a bound changed."""


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


def importance_weights(
    log_ratio_T: torch.Tensor, sequences: Sequences, *, level: str, mode: str, low: float = 0.0, high: float = float("inf")
) -> ImportanceWeights:
    """Weights from ``log_ratio`` (lp_train - lp_rollout, 0 outside the mask, not clamped).

    ``level`` is token, or sequence for the product over the sequence's trained tokens at each of them. ``mode`` is truncate
    (``high`` alone), clip (both bounds), or mask (0 outside ``[low, high]``).

    Raises:
        ValueError: a bound is not positive or they cross, or an unknown level or mode.
    """
    if not 0 <= low <= high or high <= 0:
        raise ValueError(f"bounds must be positive and in order, got {low} and {high}")
    if level not in ("token", "sequence") or mode not in ("truncate", "clip", "mask"):
        raise ValueError(f"unknown level {level} or mode {mode}")
    with torch.no_grad():
        logs = log_ratio_T if level == "token" else sequences.spread(sequences.sum(log_ratio_T))
        one = torch.ones_like(logs)
        # a bound on the wrong side of 1 must not reach the tokens outside the mask
        ratio = torch.where(sequences.trained, logs.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp(), one)
        outside = (ratio > high) | ((ratio < low) & (mode != "truncate"))
        if mode == "mask":
            bounded = torch.where(outside, torch.zeros_like(ratio), ratio)
        else:
            bounded = ratio.clamp(None if mode == "truncate" else low, high)
        weights = torch.where(sequences.trained, bounded, one)
        return ImportanceWeights(weights=weights, ratio=ratio, out_of_bounds=(outside & sequences.trained).to(ratio.dtype))


def batch_normalization_factor(weights_T: torch.Tensor, sequences: Sequences, *, level: str) -> float:
    """Mean of the weights over trained tokens, or over sequences with a trained token, by which verl divides them; 1 if there are none."""
    weights = weights_T[sequences.trained] if level == "token" else sequences.mean(weights_T)[sequences.lengths > 0]
    return float(weights.double().mean()) if weights.numel() else 1.0
