"""Slow, scalar restatement of GRPO: advantages, clipped loss and its gradient by cases."""

import math
import statistics

from references.correction_reference import bounded, difference


def advantages(rewards: list[float], group_ids: list[int], normalize_by_std: bool, eps: float) -> tuple[list[float], int]:
    """Advantages and the number of groups whose rewards are all equal."""
    result, degenerate = [0.0] * len(rewards), 0
    for group in set(group_ids):
        members = [i for i, g in enumerate(group_ids) if g == group]
        values = [rewards[i] for i in members]
        if max(values) == min(values):
            degenerate += 1
            continue
        for i in members:
            centered = rewards[i] - statistics.fmean(values)
            result[i] = centered / (statistics.stdev(values) + eps) if normalize_by_std else centered
    return result, degenerate


def token(log_prob: float, old: float, advantage: float, clip_low: float, clip_high: float) -> tuple[float, float, bool, bool]:
    """(loss, d loss / d log_prob, clipped low, clipped high) of one trained token, by cases and without min or clamp."""
    log_ratio = difference(log_prob, old)
    ratio = math.exp(bounded(log_ratio))
    low, high = ratio < 1 - clip_low and advantage < 0, ratio > 1 + clip_high and advantage > 0
    if low:
        return -(1 - clip_low) * advantage, 0.0, True, False
    if high:
        return -(1 + clip_high) * advantage, 0.0, False, True
    return -ratio * advantage, 0.0 if abs(log_ratio) > 20 else -ratio * advantage, False, False


def k3(log_prob: float, ref: float) -> tuple[float, float]:
    """(estimate, its derivative by log_prob)."""
    d = difference(ref, log_prob)
    return math.exp(bounded(d)) - bounded(d) - 1, 0.0 if abs(d) > 20 else 1 - math.exp(d)
