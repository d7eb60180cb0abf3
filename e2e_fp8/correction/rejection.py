"""Rejection masks: tokens or whole sequences that the trainer and the rollout policy disagree on too much. Legend: T, S.

With d = lp_train - lp_rollout: k1 is d itself, k2 is d^2/2, k3 is exp(d) - 1 - d. A rule takes one of them per token, or summed,
averaged or maximised over a sequence, and keeps what is within its bounds. A k1 rule's bounds are those of the ratio: exp of d, of its
sum, or of its mean (the geometric mean of the ratios). verl compares -d with the logarithms of the bounds, so its intervals are
inverted (its pull request 6377); these are not. Nothing is clamped: an infinite or nan statistic is outside every interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.config.correction import RejectionRule
from e2e_fp8.correction.importance import LOG_RATIO_CLAMP
from e2e_fp8.correction.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """What a chain of rules keeps."""

    keep: torch.Tensor
    """bool ``[T]``: trained tokens that passed every rule; True outside the loss mask."""
    metrics: dict[str, float]
    """Under ``rollout_corr/``; empty when nothing is trained."""


def rejection_mask(
    log_ratio_T: torch.Tensor, sequences: Sequences, rules: Sequence[RejectionRule], *, veto_threshold: float | None = None
) -> Rejection:
    """Chain of ``rules`` and veto on ``log_ratio`` (lp_train - lp_rollout, 0 outside the mask, not clamped).

    With ``veto_threshold``, a sequence with one token whose ratio is below it is rejected whole.
    """
    d = log_ratio_T.detach().double()
    keep = torch.ones_like(sequences.trained)
    metrics: dict[str, float] = {}
    for rule in rules:
        per_sequence, statistic = _statistic(d, sequences, rule.option)
        low, high = (math.log(rule.low), math.log(rule.high)) if rule.option.endswith("k1") else (-math.inf, rule.high)
        passed = (statistic >= low) & (statistic <= high)
        keep &= sequences.spread(passed) if per_sequence else passed
        metrics |= _statistic_metrics(rule, statistic[sequences.lengths > 0] if per_sequence else statistic[sequences.trained], low, high)
    if veto_threshold is not None:
        vetoed = sequences.sum((d < math.log(veto_threshold)).double()) > 0
        keep &= sequences.spread(~vetoed)
    keep |= ~sequences.trained
    return Rejection(keep=keep, metrics=metrics | _rejected_fractions(keep, sequences))


def _statistic(d: torch.Tensor, sequences: Sequences, option: str) -> tuple[bool, torch.Tensor]:
    """Whether it is one value a sequence, and the statistic; k1 as a log ratio."""
    level, _, kind = option.rpartition("_")
    if kind == "k1":
        values = d
    elif kind == "k2":
        values = d**2 / 2
    else:
        values = torch.where(d == math.inf, d, torch.expm1(d) - d)
    reduce = {"token": None, "seq_sum": sequences.sum, "seq_mean": sequences.mean, "seq_max": sequences.max}[level]
    return (False, values) if reduce is None else (True, reduce(values))


def _statistic_metrics(rule: RejectionRule, statistic: torch.Tensor, low: float, high: float) -> dict[str, float]:
    """In the units of the rule's bounds: ratios, exponent clamped, for k1."""
    if not statistic.numel():
        return {}
    values = statistic.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp() if rule.option.endswith("k1") else statistic
    prefix = f"rollout_corr/rollout_rs_{rule.option}"
    return {
        f"{prefix}_mean": float(values.mean()),
        f"{prefix}_std": float(values.std(correction=0)),
        f"{prefix}_max": float(values.max()),
        f"{prefix}_min": float(values.min()),
        f"{prefix}_fraction_high": float((statistic > high).double().mean()),
        f"{prefix}_fraction_low": float((statistic < low).double().mean()),
    }


def _rejected_fractions(keep: torch.Tensor, sequences: Sequences) -> dict[str, float]:
    if not bool(sequences.trained.any()):
        return {}
    rejected = (~keep).double()
    per_sequence = sequences.sum(rejected)[sequences.lengths > 0]
    return {
        "rollout_corr/rollout_rs_masked_fraction": float(rejected[sequences.trained].mean()),
        "rollout_corr/rollout_rs_seq_masked_fraction": float((per_sequence > 0).double().mean()),
    }
