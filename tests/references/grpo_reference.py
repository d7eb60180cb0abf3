"""Slow float64 statements of the GRPO objective: values and gradients in closed form, one token at a time."""

import math
from collections.abc import Sequence


def advantages(rewards: Sequence[float], groups: Sequence[int], *, normalize: bool, eps: float) -> list[float]:
    """(R - mean) / (unbiased std + eps) within each group; 0 where all rewards of the group are equal."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if min(peers) == max(peers):
            result.append(0.0)
            continue
        mean = math.fsum(peers) / len(peers)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        result.append((reward - mean) / (std + eps) if normalize else reward - mean)
    return result


def token_loss(log_ratio: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, clipped * advantage)


def token_gradient(log_ratio: float, advantage: float, low: float, high: float) -> float:
    """d loss / d log-prob: 0 where clipped, else -ratio * advantage."""
    ratio = math.exp(log_ratio)
    if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
        return 0.0
    return -ratio * advantage


def loss_and_gradient(tokens: Sequence[dict], *, low: float, high: float, bound: float | None, kl: float, entropy: float):
    """Loss sum and its gradients by log-prob and by entropy.

    A token is a dictionary of mask, lp, old, rollout, ref, advantage and entropy; ``bound`` is the TIS bound or None.
    """
    total, by_log_prob, by_entropy = 0.0, [], []
    for t in tokens:
        if not t["mask"]:
            by_log_prob.append(0.0)
            by_entropy.append(0.0)
            continue
        weight = 1.0 if bound is None else min(math.exp(t["old"] - t["rollout"]), bound)
        d = t["ref"] - t["lp"]
        x = t["lp"] - t["old"]
        total += weight * token_loss(x, t["advantage"], low, high) + kl * (math.exp(d) - d - 1) - entropy * t["entropy"]
        by_log_prob.append(weight * token_gradient(x, t["advantage"], low, high) + kl * (1 - math.exp(d)))
        by_entropy.append(-entropy)
    return total, by_log_prob, by_entropy
