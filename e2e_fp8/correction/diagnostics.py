"""Mismatch between trainer and rollout engine, under verl's ``rollout_corr/*`` names plus ``mismatch_kl``.

With d = lp_train - lp_rollout over trained tokens: kl = mean(-d); k3 = mean(exp(d) - d - 1), an estimate of KL(rollout, train);
chi2_token = mean(exp(2 clip(d))) - 1; chi2_seq = mean over sequences of exp(2 clip(sum d)) - 1; log_ppl_diff = per-sequence
mean of -d; ESS = 1 / mean((w / mean w)^2). clip is to +-20; kl, k3 and the perplexities are not clipped, so that a broken token
shows at its full size. Source: verl ``trainer/ppo/rollout_corr_helper.py``. Legend: T packed tokens, S sequences.
"""

import math

import torch

from e2e_fp8.correction.importance import LOG_RATIO_CLAMP, log_ratio


def mismatch_metrics(
    train_log_probs_T: torch.Tensor,
    rollout_log_probs_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    threshold: float = 2.0,
) -> dict[str, float]:
    """Metrics of one step; computed in float64. Empty dictionary when no token is trained.

    ``threshold`` splits ``rollout_is_ratio_fraction_{high,low}`` (above it, below its inverse). ``rollout_is_*`` speak of the ratio
    before truncation, clamped to exp(+-20); as in verl, its std and effective sample size take it within ``[1/threshold, threshold]``.

    Raises:
        ValueError: shapes differ or ``cu_seqlens`` does not end at T.
    """
    if int(cu_seqlens_S1[-1]) != train_log_probs_T.numel():
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens_S1[-1])}, not at {train_log_probs_T.numel()} tokens")
    train_T, rollout_T = train_log_probs_T.detach().double().cpu(), rollout_log_probs_T.detach().double().cpu()
    trained = loss_mask_T.cpu() > 0
    d_T = log_ratio(train_T, rollout_T, trained)
    if not bool(trained.any()):
        return {}
    sequence_T = torch.repeat_interleave(torch.arange(len(cu_seqlens_S1) - 1), cu_seqlens_S1.diff().cpu())
    d, sequence, train, rollout = d_T[trained], sequence_T[trained], train_T[trained], rollout_T[trained]
    return _token_metrics(d, train, rollout, threshold) | _sequence_metrics(d, train, rollout, sequence)


def _token_metrics(d: torch.Tensor, train: torch.Tensor, rollout: torch.Tensor, threshold: float) -> dict[str, float]:
    ratio = d.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    # sorted, as a threshold below 1 puts its inverse above it
    within = ratio.clamp(*sorted((1.0 / threshold, threshold)))
    probability_difference = (train.exp() - rollout.exp()).abs()
    k3 = float(torch.where(d == math.inf, d, torch.expm1(d) - d).mean())
    return {
        "mismatch_kl": k3,
        "rollout_corr/k3_kl": k3,
        "rollout_corr/kl": float((-d).mean()),
        "rollout_corr/chi2_token": float((ratio**2).mean() - 1),
        "rollout_corr/rollout_is_mean": float(ratio.mean()),
        "rollout_corr/rollout_is_std": float(within.std(correction=0)),
        "rollout_corr/rollout_is_min": float(ratio.min()),
        "rollout_corr/rollout_is_max": float(ratio.max()),
        "rollout_corr/rollout_is_eff_sample_size": float(1.0 / ((within / within.mean()) ** 2).mean()),
        "rollout_corr/rollout_is_ratio_fraction_high": float((ratio > threshold).double().mean()),
        "rollout_corr/rollout_is_ratio_fraction_low": float((ratio < 1.0 / threshold).double().mean()),
        "train_rollout_logprob_abs_diff/mean": float(d.abs().mean()),
        "train_rollout_logprob_abs_diff/max": float(d.abs().max()),
        "training/rollout_probs_diff_mean": float(probability_difference.mean()),
        "training/rollout_probs_diff_max": float(probability_difference.max()),
        "training/rollout_probs_diff_std": float(probability_difference.std()) if len(d) > 1 else 0.0,
    }


def _sequence_metrics(d: torch.Tensor, train: torch.Tensor, rollout: torch.Tensor, sequence: torch.Tensor) -> dict[str, float]:
    _, index = torch.unique(sequence, return_inverse=True)
    count = torch.bincount(index).double()

    def per_sequence(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(count).index_add_(0, index, values)

    log_ppl_train, log_ppl_rollout = -per_sequence(train) / count, -per_sequence(rollout) / count
    difference = -per_sequence(d) / count
    sums = per_sequence(d).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "rollout_corr/training_log_ppl": float(log_ppl_train.mean()),
        "rollout_corr/training_ppl": float(log_ppl_train.exp().mean()),
        "rollout_corr/rollout_log_ppl": float(log_ppl_rollout.mean()),
        "rollout_corr/rollout_ppl": float(log_ppl_rollout.exp().mean()),
        "rollout_corr/log_ppl_diff": float(difference.mean()),
        "rollout_corr/log_ppl_abs_diff": float(difference.abs().mean()),
        "rollout_corr/log_ppl_diff_max": float(difference.max()),
        "rollout_corr/log_ppl_diff_min": float(difference.min()),
        "rollout_corr/ppl_ratio": float(difference.exp().mean()),
        "rollout_corr/chi2_seq": float((2 * sums).exp().mean() - 1),
    }
