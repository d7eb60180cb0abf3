"""From samples to micro-batches ready for the update: old and reference log-probs, values, shaped rewards, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from e2e_fp8.correction.apply import joined_boundaries
from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, regrouped, with_advantages
from e2e_fp8.orchestration.critic import with_gae
from e2e_fp8.orchestration.old_log_probs import Measured, old_policy
from e2e_fp8.orchestration.replay import coverage_metrics, routing_of
from e2e_fp8.orchestration.session import Session
from e2e_fp8.orchestration.shaping import kl_is_in_reward, mean_kl, punished_rewards, token_kl
from e2e_fp8.types import PackedBatch, Sample
from e2e_fp8.update.advantages import group_advantages

Minibatches = list[list[PackedBatch]]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Micro-batches of each mini-batch, without correction."""

    minibatches: Minibatches
    measured: Measured | None
    """What the trainer computed of the old policy; None in bypass mode without an audit."""
    audit_passed: bool
    """The engine's log-probs are known to be the old policy's, bit for bit."""
    metrics: dict[str, float]

    @property
    def batches(self) -> list[PackedBatch]:
        """All micro-batches."""
        return [b for part in self.minibatches for b in part]


def score(session: Session, samples: Sequence[Sample], timer: PhaseTimer) -> Scored:
    """Pack ``samples``, add old and reference log-probs, and advantages from the shaped rewards. Groups stay whole."""
    cfg = session.cfg
    group_ids = [s.group_id for s in samples]
    slices = minibatch_slices(group_ids, min(cfg.training.minibatches_per_step, len(set(group_ids))))
    parts, metrics = _packed(session, samples, slices)
    old = old_policy(session, parts, timer)
    batches, metrics = old.batches, metrics | old.metrics
    if session.reference is not None:
        with timer("reference"):
            reference = session.reference.token_stats([b.without_replay() for b in batches])
        batches = [replace(b, ref_log_probs=r.log_probs * b.loss_mask) for b, r in zip(batches, reference, strict=True)]
    if session.critic is None:
        batches, advantage_metrics = _group_advantages(session, samples, batches)
    else:
        with timer("values"):
            values = session.critic.values(batches)
        batches, advantage_metrics = with_gae(cfg, samples, batches, values)
    metrics |= advantage_metrics | _dilution(samples, batches)
    minibatches = regrouped(batches, parts)
    return Scored(minibatches=minibatches, measured=old.measured, audit_passed=old.audit_passed, metrics=metrics)


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


def _group_advantages(
    session: Session, samples: Sequence[Sample], batches: Sequence[PackedBatch]
) -> tuple[list[PackedBatch], dict[str, float]]:
    """One advantage a sequence from the shaped rewards, relative to its group."""
    objective = session.cfg.objective
    rewards, metrics = punished_rewards(session.cfg, samples)
    if kl_is_in_reward(session.cfg):
        kl = [token_kl(b, objective.kl_estimator) for b in batches]
        metrics |= mean_kl(kl, batches)
        sums = torch.cat([Sequences.of(b.loss_mask, b.cu_seqlens).sum(k).cpu() for b, k in zip(batches, kl, strict=True)])
        rewards = rewards - objective.kl_coef * sums
    group_ids = torch.tensor([s.group_id for s in samples])
    advantages, _ = group_advantages(rewards, group_ids, normalize_by_std=objective.normalize_by_std, eps=objective.advantage_eps)
    return with_advantages(batches, advantages), metrics


def _dilution(samples: Sequence[Sample], batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Mean |advantage| of responses longer than the median over that of the others; nothing when either side has none."""
    lengths = torch.tensor([len(s.response_token_ids) for s in samples])
    magnitude = torch.cat([Sequences.of(b.loss_mask, b.cu_seqlens).mean(b.advantages.abs()).cpu() for b in batches])
    long = lengths > lengths.median()
    if not bool(long.any()) or not float(magnitude[~long].sum()):
        return {}
    return {"advantages/long_to_short": float(magnitude[long].mean() / magnitude[~long].mean())}


def mismatch(batches: Sequence[PackedBatch], train_log_probs: Sequence[torch.Tensor], threshold: float) -> dict[str, float]:
    """verl's ``rollout_corr/*`` over all response tokens of ``batches``."""
    return mismatch_metrics(
        torch.cat([lp.detach().cpu() for lp in train_log_probs]),
        torch.cat([b.rollout_log_probs.cpu() for b in batches]),
        torch.cat([b.loss_mask.cpu() for b in batches]),
        joined_boundaries(batches),
        threshold,
    )
