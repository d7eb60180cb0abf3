"""Slow float64 statements of the mismatch formulas, one Python float at a time."""

import math
from collections.abc import Sequence

CLAMP = 20.0


def clip(x: float, low: float, high: float) -> float:
    return x if math.isnan(x) else min(max(x, low), high)


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def difference(train: float, rollout: float) -> float:
    return 0.0 if train == rollout else train - rollout


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def deviation(values: Sequence[float], divisor: int) -> float:
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / divisor)


def tis_weight(old: float, rollout: float, threshold: float) -> float:
    return min(exp(clip(difference(old, rollout), -CLAMP, CLAMP)), threshold)


def k3(d: float) -> float:
    """exp(d) - d - 1 without cancellation near 0, infinite at both ends."""
    if math.isinf(d):
        return math.inf
    return sum(d**n / math.factorial(n) for n in range(2, 12)) if abs(d) < 0.05 else exp(d) - d - 1


def mismatch(
    train: Sequence[float], rollout: Sequence[float], mask: Sequence[float], cu_seqlens: Sequence[int], threshold: float
) -> dict[str, float]:
    """Every metric of ``mismatch_metrics``; lists of T entries, S + 1 boundaries."""
    trained = [t for t, m in enumerate(mask) if m]
    d = [difference(train[t], rollout[t]) for t in trained]
    w = [exp(clip(x, -CLAMP, CLAMP)) for x in d]
    bounded = [clip(x, 1 / threshold, threshold) for x in w]
    probabilities = [abs(math.exp(train[t]) - math.exp(rollout[t])) for t in trained]
    sequences = [[t for t in range(a, b) if mask[t]] for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
    sequences = [s for s in sequences if s]
    train_ppl = [-mean([train[t] for t in s]) for s in sequences]
    rollout_ppl = [-mean([rollout[t] for t in s]) for s in sequences]
    gaps = [mean([-difference(train[t], rollout[t]) for t in s]) for s in sequences]
    sums = [clip(sum(difference(train[t], rollout[t]) for t in s), -CLAMP, CLAMP) for s in sequences]
    return {
        "mismatch_kl": mean([k3(x) for x in d]),
        "rollout_corr/k3_kl": mean([k3(x) for x in d]),
        "rollout_corr/kl": mean([-x for x in d]),
        "rollout_corr/chi2_token": mean([x * x for x in w]) - 1,
        "rollout_corr/chi2_seq": mean([math.exp(2 * x) for x in sums]) - 1,
        "rollout_corr/rollout_is_mean": mean(w),
        "rollout_corr/rollout_is_std": deviation(bounded, len(w)),
        "rollout_corr/rollout_is_min": min(w),
        "rollout_corr/rollout_is_max": max(w),
        "rollout_corr/rollout_is_eff_sample_size": mean(bounded) ** 2 / mean([x * x for x in bounded]),
        "rollout_corr/rollout_is_ratio_fraction_high": sum(x > threshold for x in w) / len(w),
        "rollout_corr/rollout_is_ratio_fraction_low": sum(x < 1 / threshold for x in w) / len(w),
        "train_rollout_logprob_abs_diff/mean": mean([abs(x) for x in d]),
        "train_rollout_logprob_abs_diff/max": max(abs(x) for x in d),
        "training/rollout_probs_diff_mean": mean(probabilities),
        "training/rollout_probs_diff_max": max(probabilities),
        "training/rollout_probs_diff_std": deviation(probabilities, len(d) - 1) if len(d) > 1 else 0.0,
        "rollout_corr/training_log_ppl": mean(train_ppl),
        "rollout_corr/training_ppl": mean([exp(x) for x in train_ppl]),
        "rollout_corr/rollout_log_ppl": mean(rollout_ppl),
        "rollout_corr/rollout_ppl": mean([exp(x) for x in rollout_ppl]),
        "rollout_corr/log_ppl_diff": mean(gaps),
        "rollout_corr/log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "rollout_corr/log_ppl_diff_max": max(gaps),
        "rollout_corr/log_ppl_diff_min": min(gaps),
        "rollout_corr/ppl_ratio": mean([exp(x) for x in gaps]),
    }
