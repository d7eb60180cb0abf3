"""From samples to micro-batches ready for the update: old and reference log-probs, shaped rewards, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from e2e_fp8.correction.apply import joined_boundaries
from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, regrouped, with_advantages, with_old_log_probs
from e2e_fp8.orchestration.replay import changed_metrics, coverage_metrics, routing_of
from e2e_fp8.orchestration.session import Session
from e2e_fp8.types import PackedBatch, Sample, TokenStats
from e2e_fp8.update.advantages import group_advantages
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.rewards import soft_overlong_penalty

Minibatches = list[list[PackedBatch]]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Micro-batches of each mini-batch, without correction."""

    minibatches: Minibatches
    stats: list[TokenStats] | None
    """Of the old policy, in order of the micro-batches; None in bypass mode, which does not compute them."""
    metrics: dict[str, float]

    @property
    def batches(self) -> list[PackedBatch]:
        """All micro-batches."""
        return [b for part in self.minibatches for b in part]


def score(session: Session, samples: Sequence[Sample], timer: PhaseTimer) -> Scored:
    """Pack ``samples``, add old and reference log-probs, and advantages from the shaped rewards. Groups stay whole."""
    cfg, trainer = session.cfg, session.trainer
    group_ids = [s.group_id for s in samples]
    slices = minibatch_slices(group_ids, min(cfg.training.minibatches_per_step, len(set(group_ids))))
    parts, metrics = _packed(session, samples, slices)
    batches, stats = [b for part in parts for b in part], None
    if cfg.correction.bypass_mode:
        batches = [replace(b, old_log_probs=b.rollout_log_probs) for b in batches]
    else:
        stats = trainer.token_stats(batches)
        metrics |= changed_metrics(trainer.take_replay_counts())
        batches = [with_old_log_probs(b, s.log_probs) for b, s in zip(batches, stats, strict=True)]
    if session.reference is not None:
        with timer("reference"):
            reference = session.reference.token_stats([b.without_replay() for b in batches])
        batches = [replace(b, ref_log_probs=r.log_probs * b.loss_mask) for b, r in zip(batches, reference, strict=True)]
    rewards, shaping = _shaped_rewards(session, samples, batches)
    advantages, _ = group_advantages(
        rewards, torch.tensor(group_ids), normalize_by_std=cfg.objective.normalize_by_std, eps=cfg.objective.advantage_eps
    )
    batches = with_advantages(batches, advantages)
    metrics |= shaping | _advantage_metrics(samples, advantages)
    return Scored(minibatches=regrouped(batches, parts), stats=stats, metrics=metrics)


def _packed(session: Session, samples: Sequence[Sample], slices: Sequence[slice]) -> tuple[Minibatches, dict[str, float]]:
    """Micro-batches of each slice of the samples, without log-probs and advantages, and what of their routing is replayed."""
    cfg, replay = session.cfg, session.cfg.training.router_replay
    blank, routings, metrics = torch.zeros(len(samples)), None, {}
    if replay.enabled:
        routings = [routing_of(s, cfg) for s in samples]
        metrics = coverage_metrics(samples, routings, masked=replay.uncovered == "mask")
    parts = [
        pack_samples(
            samples[part],
            blank[part],
            max_tokens=cfg.training.max_tokens_per_microbatch,
            device=session.trainer.device,
            shares=session.trainer.grid.data,
            routings=None if routings is None else routings[part],
            mask_uncovered=replay.uncovered == "mask",
        )
        for part in slices
    ]
    return parts, metrics


def _advantage_metrics(samples: Sequence[Sample], advantages: torch.Tensor) -> dict[str, float]:
    """Mean |advantage| of responses longer than the median over that of the others; nothing when either side has none."""
    lengths = torch.tensor([len(s.response_token_ids) for s in samples])
    long, magnitude = lengths > lengths.median(), advantages.abs()
    if not bool(long.any()) or not float(magnitude[~long].sum()):
        return {}
    return {"advantages/long_to_short": float(magnitude[long].mean() / magnitude[~long].mean())}


def _shaped_rewards(session: Session, samples: Sequence[Sample], batches: Sequence[PackedBatch]) -> tuple[torch.Tensor, dict[str, float]]:
    """Rewards ``[N]`` with what the objective takes off them, and how much that was."""
    objective, metrics = session.cfg.objective, {}
    rewards = torch.tensor([s.reward for s in samples])
    if objective.overlong_buffer_tokens:
        lengths = torch.tensor([len(s.response_token_ids) for s in samples])
        limit, buffer = session.cfg.rollout.max_response_tokens, objective.overlong_buffer_tokens
        penalty = soft_overlong_penalty(lengths, max_tokens=limit, buffer_tokens=buffer, penalty=objective.overlong_penalty)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
        rewards = rewards + penalty
    if objective.kl_coef and objective.kl_placement == "reward":
        kl = torch.cat([_sequence_kl(b, objective.kl_estimator) for b in batches])
        metrics["kl_ref"] = float(kl.sum() / max(sum(float(b.loss_mask.sum()) for b in batches), 1.0))
        rewards = rewards - objective.kl_coef * kl
    return rewards, metrics


def _sequence_kl(batch: PackedBatch, estimator: str) -> torch.Tensor:
    """``[S]`` sums over the response of the estimate of KL(old, reference)."""
    if batch.ref_log_probs is None:
        raise ValueError("objective.kl_placement is reward but the batch has no ref_log_probs")
    estimate = kl_estimate(safe_log_ratio(batch.ref_log_probs, batch.old_log_probs, batch.loss_mask), estimator)
    return Sequences.of(batch.loss_mask, batch.cu_seqlens).sum(estimate).cpu()


def mismatch(batches: Sequence[PackedBatch], train_log_probs: Sequence[torch.Tensor], threshold: float) -> dict[str, float]:
    """verl's ``rollout_corr/*`` over all response tokens of ``batches``."""
    return mismatch_metrics(
        torch.cat([lp.detach().cpu() for lp in train_log_probs]),
        torch.cat([b.rollout_log_probs.cpu() for b in batches]),
        torch.cat([b.loss_mask.cpu() for b in batches]),
        joined_boundaries(batches),
        threshold,
    )
