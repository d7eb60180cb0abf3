"""Slow, scalar restatement of the rollout-correction formulas: one Python float at a time, one token at a time."""

import math

CLAMP = 20.0


def difference(train: float, rollout: float) -> float:
    """train - rollout with inf - inf of equal sign as 0."""
    if math.isinf(train) and train == rollout:
        return 0.0
    return train - rollout


def bounded(value: float) -> float:
    return value if math.isnan(value) else max(-CLAMP, min(CLAMP, value))


def weights(old: list[float], rollout: list[float], mask: list[int], threshold: float) -> tuple[list[float], list[int]]:
    """(weight, was the bound active) of each token."""
    result, active = [], []
    for o, r, m in zip(old, rollout, mask, strict=True):
        ratio = math.exp(bounded(difference(o, r))) if m else 1.0
        result.append(min(ratio, threshold) if m else 1.0)
        active.append(int(bool(m) and ratio > threshold))
    return result, active


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def metrics(sequences: list[list[tuple[float, float]]], threshold: float) -> dict[str, float]:
    """Metrics of sequences of (train, rollout) log-probs of trained tokens; finite inputs, every sequence not empty."""
    pairs = [pair for sequence in sequences for pair in sequence]
    d = [t - r for t, r in pairs]
    ratio = [math.exp(bounded(x)) for x in d]
    low, high = sorted((1 / threshold, threshold))
    within = [min(max(x, low), high) for x in ratio]
    gap = [abs(math.exp(t) - math.exp(r)) for t, r in pairs]
    k3 = mean([math.exp(x) - x - 1 for x in d])
    log_ppl_train = [-mean([t for t, _ in s]) for s in sequences]
    log_ppl_rollout = [-mean([r for _, r in s]) for s in sequences]
    log_ppl_diff = [mean([r - t for t, r in s]) for s in sequences]
    sums = [math.fsum(t - r for t, r in s) for s in sequences]
    result = {
        "kl": mean([-x for x in d]),
        "k3_kl": k3,
        "chi2_token": mean([math.exp(2 * bounded(x)) for x in d]) - 1,
        "chi2_seq": mean([math.exp(2 * bounded(x)) for x in sums]) - 1,
        "training_log_ppl": mean(log_ppl_train),
        "training_ppl": mean([math.exp(x) for x in log_ppl_train]),
        "rollout_log_ppl": mean(log_ppl_rollout),
        "rollout_ppl": mean([math.exp(x) for x in log_ppl_rollout]),
        "log_ppl_diff": mean(log_ppl_diff),
        "log_ppl_abs_diff": mean([abs(x) for x in log_ppl_diff]),
        "log_ppl_diff_max": max(log_ppl_diff),
        "log_ppl_diff_min": min(log_ppl_diff),
        "ppl_ratio": mean([math.exp(x) for x in log_ppl_diff]),
        "rollout_is_mean": mean(ratio),
        "rollout_is_std": math.sqrt(mean([(x - mean(within)) ** 2 for x in within])),
        "rollout_is_min": min(ratio),
        "rollout_is_max": max(ratio),
        "rollout_is_eff_sample_size": mean(within) ** 2 / mean([x * x for x in within]),
        "rollout_is_ratio_fraction_high": mean([float(x > threshold) for x in ratio]),
        "rollout_is_ratio_fraction_low": mean([float(x < 1 / threshold) for x in ratio]),
    }
    variance = math.fsum((x - mean(gap)) ** 2 for x in gap) / (len(gap) - 1) if len(gap) > 1 else 0.0
    return {f"rollout_corr/{name}": value for name, value in result.items()} | {
        "mismatch_kl": k3,
        "train_rollout_logprob_abs_diff/mean": mean([abs(x) for x in d]),
        "train_rollout_logprob_abs_diff/max": max(abs(x) for x in d),
        "training/rollout_probs_diff_mean": mean(gap),
        "training/rollout_probs_diff_max": max(gap),
        "training/rollout_probs_diff_std": math.sqrt(variance),
    }


Rows = list[list[tuple[float, float, int]]]
"""Sequences of (train, rollout, mask)."""


def importance(rows: Rows, level: str, mode: str, low: float, high: float) -> list[list[float]]:
    """Bounded weight of every token; 1 outside the mask."""
    result = []
    for row in rows:
        total = sum(difference(t, r) for t, r, m in row if m)
        weights = []
        for t, r, m in row:
            ratio = math.exp(bounded(total if level == "sequence" else difference(t, r))) if m else 1.0
            if mode == "mask":
                bounded_ratio = ratio if low <= ratio <= high else 0.0
            else:
                bounded_ratio = min(ratio if mode == "truncate" else max(ratio, low), high)
            weights.append(bounded_ratio if m else 1.0)
        result.append(weights)
    return result


def statistic(d: float, kind: str) -> float:
    if kind == "k1":
        return d
    if math.isinf(d):
        return math.inf
    return d * d / 2 if kind == "k2" else math.exp(d) - 1 - d


def kept(rows: Rows, option: str, low: float, high: float) -> list[list[bool]]:
    """Whether each token stays under one rule; True outside the mask. k1 bounds are of the ratio."""
    level, _, kind = option.rpartition("_")
    result = []
    for row in rows:
        values = [statistic(difference(t, r), kind) for t, r, m in row if m]
        if level != "token" and values:
            one = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[level]
            values = [one] * len(values)
        passed = [math.log(low) <= v <= math.log(high) for v in values] if kind == "k1" else [v <= high for v in values]
        each = iter(passed)
        result.append([next(each) if m else True for _, _, m in row])
    return result


def vetoed(rows: Rows, threshold: float) -> list[bool]:
    """Whether a sequence has a trained token whose ratio is below ``threshold``."""
    return [any(m and difference(t, r) < math.log(threshold) for t, r, m in row) for row in rows]
