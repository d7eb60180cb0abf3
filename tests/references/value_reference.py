"""Slow, scalar restatement of GAE, PPO's value loss, whitening and rewards per token, one float64 at a time.

A sequence is a list of ``(reward, value, trained)``; steps are its trained tokens.
"""

import math

Row = list[tuple[float, float, bool]]


def advantages(row: Row, gamma: float, lam: float) -> list[float]:
    """By the definition (arXiv 1506.02438, equation 16, finite horizon): sum over k of (gamma lam)^k delta_{t+k}; 0 outside the mask."""
    steps = [(r, v) for r, v, trained in row if trained]
    n = len(steps)
    deltas = [r + gamma * (steps[t + 1][1] if t + 1 < n else 0.0) - v for t, (r, v) in enumerate(steps)]
    found = iter([math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])
    return [next(found) if trained else 0.0 for _, _, trained in row]


def advantages_as_mixture(row: Row, gamma: float, lam: float) -> list[float]:
    """The same as the exponentially weighted mean of all n-step advantages (arXiv 1506.02438, equations 11 to 16)."""
    steps = [(r, v) for r, v, trained in row if trained]
    n = len(steps)

    def n_step(t: int, k: int) -> float:
        """r_t + ... + gamma^(k-1) r_{t+k-1} + gamma^k V_{t+k} - V_t."""
        after = steps[t + k][1] if t + k < n else 0.0
        return math.fsum([*(gamma**i * steps[t + i][0] for i in range(k)), gamma**k * after, -steps[t][1]])

    found = []
    for t in range(n):
        left = n - t
        weights = [(1 - lam) * lam ** (k - 1) for k in range(1, left)] + [lam ** (left - 1)]
        found.append(math.fsum(w * n_step(t, k) for w, k in zip(weights, range(1, left + 1), strict=True)))
    each = iter(found)
    return [next(each) if trained else 0.0 for _, _, trained in row]


def value_loss(value: float, old: float, ret: float, clip: float | None) -> tuple[float, float, bool]:
    """Loss of one token, its derivative by the value, and whether the clipped error is the larger one."""
    error = value - ret
    if clip is None:
        return error * error / 2, error, False
    clipped = min(max(value, old - clip), old + clip) - ret
    if clipped * clipped > error * error:
        return clipped * clipped / 2, 0.0, True
    return error * error / 2, error, False


def whiten(values: list[float]) -> list[float]:
    """(x - mean) / (std + 1e-8), std unbiased; 0 for a single value."""
    n = len(values)
    if n < 2:
        return [0.0] * n
    mean = math.fsum(values) / n
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))
    return [(x - mean) / (std + 1e-8) for x in values]


def rewards_per_token(reward: float, kl: list[float], mask: list[bool], kl_coef: float) -> list[float]:
    """-kl_coef KL_t at every trained token, and the response's reward at the last of them."""
    last = max((t for t, trained in enumerate(mask) if trained), default=None)
    return [(reward if t == last else 0.0) - kl_coef * k if trained else 0.0 for t, (k, trained) in enumerate(zip(kl, mask, strict=True))]
