"""Slow, scalar restatement of every objective from its paper: loss and gradient by log-prob of a whole batch, one float at a time.

A batch is a list of sequences of tokens; only trained tokens (mask 1) count. Gradients are closed forms, by cases.
"""

import math
from dataclasses import dataclass, field

from references.correction_reference import bounded, difference


@dataclass(frozen=True)
class Token:
    log_prob: float
    old: float
    ref: float
    advantage: float
    mask: int
    weight: float = 1.0
    entropy: float = 0.5


@dataclass(frozen=True)
class Settings:
    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    divergence_low: float = 0.15
    divergence_high: float = 0.15
    loss_agg_mode: str = "token-mean"
    norm: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0


@dataclass
class Result:
    total: float = 0.0
    gradient: list[list[float]] = field(default_factory=list)
    low: int = 0
    high: int = 0
    dual: int = 0
    denominator: float = 0.0


def clipped(ratio: float, a: float, s: Settings) -> tuple[float, float, str]:
    """Loss, its derivative by the log of the ratio, and which bound holds."""
    if a > 0 and ratio > 1 + s.clip_high:
        return -(1 + s.clip_high) * a, 0.0, "high"
    if a < 0 and ratio < 1 - s.clip_low:
        return -(1 - s.clip_low) * a, 0.0, "low"
    if a < 0 and s.dual_clip is not None and ratio > s.dual_clip:
        return -s.dual_clip * a, 0.0, "dual"
    return -ratio * a, -ratio * a, ""


def bernoulli_kl(p_old: float, p: float, lp_old: float, lp: float) -> float:
    if p_old > 0 and lp == -math.inf:
        return math.inf
    rest_old, rest = -math.expm1(lp_old), -math.expm1(lp)
    if rest_old > 0 and rest == 0:
        return math.inf
    total = p_old * (lp_old - lp) if p_old > 0 else 0.0
    return max(total + (rest_old * math.log(rest_old / rest) if rest_old > 0 else 0.0), 0.0)


def score_function(weight: float, t: Token) -> tuple[float, float]:
    """-w A lp and its derivative by lp."""
    if math.isinf(t.log_prob):
        return 0.0, 0.0
    return -weight * t.advantage * t.log_prob, -weight * t.advantage


def token_loss(t: Token, s: Settings) -> tuple[float, float, str]:
    """Loss, derivative by lp and bound of a token-level objective."""
    x = difference(t.log_prob, t.old)
    ratio, a = math.exp(bounded(x)), t.advantage
    no_gradient = abs(x) > 20 or (math.isinf(t.log_prob) and t.log_prob == t.old)
    if s.kind == "sapo":
        tau = s.tau_pos if a > 0 else s.tau_neg
        z = tau * (ratio - 1)
        p = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        return -a * p * 4 / tau, 0.0 if no_gradient else -4 * p * (1 - p) * ratio * a, ""
    if s.kind == "cispo":
        low, high = ratio < 1 - s.clip_low, ratio > 1 + s.clip_high
        weight = 1 - s.clip_low if low else 1 + s.clip_high if high else ratio
        return *score_function(weight, t), "low" if low else "high" if high else ""
    if s.kind.startswith("dppo"):
        p, p_old = math.exp(t.log_prob), math.exp(t.old)
        if s.kind == "dppo_tv":
            stopped = p - p_old > s.divergence_high if a > 0 else p_old - p > s.divergence_low
        else:
            far = bernoulli_kl(p_old, p, t.old, t.log_prob) > (s.divergence_high if a > 0 else s.divergence_low)
            stopped = far and (p > p_old if a > 0 else p < p_old)
        weight = 0.0 if stopped else min(ratio, 20.0)
        return *score_function(weight, t), ("high" if a > 0 else "low") if stopped else ""
    loss, slope, bound = clipped(ratio, a, s)
    return loss, 0.0 if no_gradient else slope, bound


def kl(t: Token, estimator: str) -> tuple[float, float]:
    """Estimate of KL(policy, reference) and its derivative by lp."""
    raw = difference(t.ref, t.log_prob)
    d = bounded(raw)
    open_ = abs(raw) <= 20 and not (math.isinf(t.ref) and t.ref == t.log_prob)
    value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator.rstrip("+")]
    slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d), "k1+": -d, "k3+": -d}[estimator]
    return value, slope if open_ else 0.0


def batch(sequences: list[list[Token]], s: Settings) -> Result:
    """Sum before the denominator, its gradient, counts of tokens by bound, and the denominator."""
    result = Result()
    for sequence in sequences:
        trained = [t for t in sequence if t.mask]
        n = len(trained)
        share = {"seq-mean-token-mean": 1 / n if n else 0.0, "seq-mean-token-sum-norm": 1 / s.norm}.get(s.loss_agg_mode, 1.0)
        result.denominator += n if s.loss_agg_mode == "token-mean" else n > 0
        gradient = [0.0] * len(sequence)
        xs = [difference(t.log_prob, t.old) for t in trained]
        mean = math.fsum(bounded(x) for x in xs) / n if n else 0.0
        spread = 0.0
        for i, t in enumerate(sequence):
            if not t.mask:
                continue
            if s.kind in ("gspo", "gspo_token"):
                loss, slope, bound = clipped(math.exp(mean), t.advantage, s)
                spread += share * t.weight * slope / n
                if s.kind == "gspo" or abs(difference(t.log_prob, t.old)) > 20 or (math.isinf(t.log_prob) and t.log_prob == t.old):
                    slope = 0.0
            else:
                loss, slope, bound = token_loss(t, s)
            value, kl_slope = kl(t, s.kl_estimator)
            result.total += share * (t.weight * loss - s.entropy_coef * t.entropy + s.kl_coef * value)
            gradient[i] += share * (t.weight * slope + s.kl_coef * kl_slope)
            result.low += bound == "low"
            result.high += bound == "high"
            result.dual += bound == "dual"
        if s.kind == "gspo":
            for i, t in enumerate(sequence):
                x = difference(t.log_prob, t.old) if t.mask else 0.0
                if t.mask and abs(x) <= 20 and not (math.isinf(t.log_prob) and t.log_prob == t.old):
                    gradient[i] += spread
        result.gradient.append(gradient)
    return result


def generalized_advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one sequence, by the definition: sum over k of (gamma lam)^k delta_{t+k}."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]
