"""Token losses of the policy; docs/formulas.md has each objective's source. Legend: T packed tokens.

All objectives are one of three functions: a clipped ratio (PPO, GRPO, DAPO, Dr. GRPO, GSPO), a detached weight times lp (CISPO, DPPO,
REINFORCE), or a soft gate of the ratio (SAPO). They take log ratios that are finite everywhere
(``correction.importance.safe_log_ratio``): a masked position that is infinite or nan would reach the gradient of the others' sum as
0 * nan.
"""

from dataclasses import dataclass

import torch

from e2e_fp8.correction.sequences import Sequences

DPPO_RATIO_CAP = 20.0
"""Largest weight of a DPPO token, as in verl (``clip_ratio_c``)."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """Loss ``[T]`` and 0/1 indicators ``[T]`` of tokens that a bound holds back, by side."""

    loss: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor
    """Tokens with a negative advantage and a ratio above the dual clip."""


def clipped_ratio_loss(
    log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -c A with ``dual_clip`` c.

    ``log_ratio`` carries the gradient: dL/d(log r) = -r A, and 0 for a clipped token: A < 0 and r below the range (``low``) or above c
    (``dual``), A > 0 and r above the range (``high``).

    Raises:
        ValueError: shapes differ.
    """
    if log_ratio_T.shape != advantages_T.shape:
        raise ValueError(f"log ratio {tuple(log_ratio_T.shape)} and advantages {tuple(advantages_T.shape)} differ")
    ratio, negative = log_ratio_T.exp(), advantages_T < 0
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages_T, clipped * advantages_T)
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if dual_clip is not None:
        dual = negative & (ratio > dual_clip)
        loss = torch.where(dual, -dual_clip * advantages_T, loss)
    low, high = negative & (ratio < 1.0 - clip_low), (ratio > 1.0 + clip_high) & (advantages_T > 0)
    return TokenLoss(loss=loss, low=low.float(), high=high.float(), dual=dual.float())


def sequence_log_ratio(log_ratio_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """GSPO: the mean of the sequence's token log ratios at each of its tokens, with the mean's gradient (1/length of each token)."""
    return sequences.spread(sequences.mean(log_ratio_T))


def sequence_token_log_ratio(log_ratio_T: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """GSPO-token: the value of ``sequence_log_ratio`` with the gradient of the token's own log ratio."""
    return log_ratio_T - log_ratio_T.detach() + sequence_log_ratio(log_ratio_T, sequences).detach()


def score_function_loss(weights_T: torch.Tensor, log_probs_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """L = -sg(w) A lp, ``[T]``; dL/dlp = -w A. A log-prob of -inf gives 0 and no gradient: it has no gradient of its own."""
    finite = torch.where(torch.isinf(log_probs_T), torch.zeros_like(log_probs_T), log_probs_T)
    return -weights_T.detach() * advantages_T * finite


def cispo_loss(
    log_ratio_T: torch.Tensor, log_probs_T: torch.Tensor, advantages_T: torch.Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """CISPO: the weight is the clipped ratio, so that a clipped token keeps a gradient; ``low`` and ``high`` are by the ratio alone."""
    ratio = log_ratio_T.detach().exp()
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    loss = score_function_loss(ratio.clamp(1.0 - clip_low, 1.0 + clip_high), log_probs_T, advantages_T)
    return TokenLoss(loss=loss, low=low.float(), high=high.float(), dual=torch.zeros_like(ratio))


def sapo_loss(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, tau_pos: float, tau_neg: float) -> TokenLoss:
    """SAPO: L = -A sigmoid(tau (r - 1)) 4 / tau; dL/d(log r) = -4 p (1 - p) r A with p the sigmoid, -A on policy."""
    tau = torch.where(advantages_T > 0, torch.full_like(log_ratio_T, tau_pos), torch.full_like(log_ratio_T, tau_neg))
    loss = -advantages_T * torch.sigmoid(tau * torch.expm1(log_ratio_T)) * 4.0 / tau
    zero = torch.zeros_like(loss.detach())
    return TokenLoss(loss=loss, low=zero, high=zero, dual=zero)


def binary_kl(old_log_probs_T: torch.Tensor, log_probs_T: torch.Tensor) -> torch.Tensor:
    """KL of (p_old, 1 - p_old) to (p, 1 - p), ``[T]``, not negative; infinite where p excludes what p_old allows."""
    old, old_rest, rest = old_log_probs_T.exp(), -torch.expm1(old_log_probs_T), -torch.expm1(log_probs_T)
    zero = torch.zeros_like(old)
    taken = torch.where(old > 0, old * (old_log_probs_T - log_probs_T), zero)
    others = torch.where(old_rest > 0, old_rest * (old_rest.log() - rest.log()), zero)
    return (taken + others).clamp_min(0.0)


def dppo_loss(
    log_ratio_T: torch.Tensor,
    log_probs_T: torch.Tensor,
    old_log_probs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    divergence: str,
    low: float,
    high: float,
) -> TokenLoss:
    """DPPO: the weight is the ratio, at most 20, and 0 for a token that has gone further than a divergence allows.

    ``divergence`` tv: the move p - p_old in the advantage's direction is at most ``high`` (A > 0) or ``low`` (others); kl: the binary
    KL is, or the move is against the advantage, that is back towards p_old. Log-probs are at most 0 and finite or -inf.

    Raises:
        ValueError: an unknown divergence.
    """
    current, up = log_probs_T.detach(), advantages_T > 0
    p, old = current.exp(), old_log_probs_T.exp()
    if divergence == "tv":
        within_high, within_low = p - old <= high, p - old >= -low
    elif divergence == "kl":
        distance = binary_kl(old_log_probs_T, current)
        within_high, within_low = (distance <= high) | (p <= old), (distance <= low) | (p >= old)
    else:
        raise ValueError(f"unknown divergence {divergence}")
    valid = torch.where(up, within_high, within_low)
    weights = log_ratio_T.detach().exp().clamp_max(DPPO_RATIO_CAP) * valid
    loss = score_function_loss(weights, log_probs_T, advantages_T)
    stopped_up, stopped_down = up & ~valid, ~up & ~valid
    return TokenLoss(loss=loss, low=stopped_down.float(), high=stopped_up.float(), dual=torch.zeros_like(weights))
