"""The old policy's log-probs: computed by the trainer, or under ``training.old_log_probs: rollout`` the engine's after an audit.

With ``numerics.alignment: bitwise`` the two are the same bits, so a pass over the whole batch tells nothing new. The audit has every
data-parallel rank compute a sample of its own sequences and compares bit for bit; the first audit of a process takes all of them, as
machine and kernels may be others than those of the last session, and so does the one after a difference. One difference, and the whole
batch is computed as ever.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import with_old_log_probs
from e2e_fp8.orchestration.replay import changed_metrics
from e2e_fp8.orchestration.session import Session
from e2e_fp8.training.microbatches import empty_batch
from e2e_fp8.training.packing import to_device
from e2e_fp8.types import PackedBatch, TokenStats

Pick = tuple[PackedBatch, int]
"""A sequence: its micro-batch and its place there."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the trainer computed before the update."""

    batches: list[PackedBatch]
    """The step's micro-batches, or those that an audit packed of its sample."""
    stats: list[TokenStats]
    whole: bool
    """Whether ``batches`` are all of the step."""


@dataclass(frozen=True, kw_only=True)
class OldPolicy:
    """Micro-batches with ``old_log_probs``, and how one knows them."""

    batches: list[PackedBatch]
    measured: Measured | None
    """None in bypass mode without an audit, where nothing is computed."""
    audit_passed: bool
    """The engine's log-probs are the trainer's at the weights before the update."""
    metrics: dict[str, float]


def old_policy(session: Session, parts: Sequence[Sequence[PackedBatch]], timer: PhaseTimer) -> OldPolicy:
    """Old log-probs for the micro-batches of each mini-batch of one RL step, which do not have them yet."""
    cfg, trainer = session.cfg, session.trainer
    batches = [b for part in parts for b in part]
    measured, passed, metrics = None, False, {}
    if cfg.training.old_log_probs == "rollout":
        measured, passed, metrics = _audit(session, parts, timer)
    if cfg.correction.bypass_mode or passed:
        batches = [replace(b, old_log_probs=b.rollout_log_probs) for b in batches]
        return OldPolicy(batches=batches, measured=measured, audit_passed=passed, metrics=metrics)
    if measured is None or not measured.whole:
        measured = Measured(batches=batches, stats=trainer.token_stats(batches), whole=True)
        metrics |= changed_metrics(trainer.take_replay_counts())
    batches = [with_old_log_probs(b, s.log_probs) for b, s in zip(batches, measured.stats, strict=True)]
    return OldPolicy(batches=batches, measured=replace(measured, batches=batches), audit_passed=False, metrics=metrics)


def _audit(session: Session, parts: Sequence[Sequence[PackedBatch]], timer: PhaseTimer) -> tuple[Measured, bool, dict[str, float]]:
    """What the trainer says of the sample, whether all of it is the engine's, and ``old_log_probs/*``."""
    cfg, trainer, rate = session.cfg, session.trainer, session.whole_pass_rate
    batches = [b for part in parts for b in part]
    before = timer.seconds().get("audit", 0.0)
    with timer("audit"):
        share = 1.0 if rate is None else cfg.training.old_log_probs_audit
        picks = sampled(batches, share, shares=trainer.grid.data, seed=f"{cfg.run.seed} {trainer.policy_version}")
        sample = batches if rate is None else packed(picks, cfg.training.max_tokens_per_microbatch, trainer.device)
        stats = trainer.token_stats(sample)
        audited, failures = sum(map(len, picks)), sum(differing(b, s.log_probs) for b, s in zip(sample, stats, strict=True))
    passed = failures == 0 and audited > 0
    metrics = changed_metrics(trainer.take_replay_counts()) | {
        "old_log_probs/audited_sequences": float(audited),
        "old_log_probs/audit_failures": float(failures),
        "old_log_probs/recomputed": float(not passed),
    }
    spent = timer.seconds()["audit"] - before
    own_rate = spent / max(1, sum(b.token_ids.numel() for b in sample))
    if rate is None:
        session.whole_pass_rate = own_rate if passed else None
    else:
        # in bypass mode the other mini-batches meet weights that have moved
        skipped = sum(b.token_ids.numel() for b in (parts[0] if cfg.correction.bypass_mode else batches)) if passed else 0
        metrics["old_log_probs/seconds_saved"] = min(rate, own_rate) * skipped - spent
        session.whole_pass_rate = rate if passed else None
    return Measured(batches=sample, stats=stats, whole=rate is None), passed, metrics


def sampled(batches: Sequence[PackedBatch], share: float, *, shares: int, seed: str) -> list[list[Pick]]:
    """For each of ``shares`` data-parallel ranks a random ``share`` of its sequences with trained tokens, in order, at least one."""
    picks = []
    for rank in range(shares):
        own = [(b, i) for b in batches[rank::shares] for i, n in enumerate(Sequences.of(b.loss_mask, b.cu_seqlens).lengths.tolist()) if n]
        count = min(len(own), max(1, math.ceil(share * len(own))))
        chosen = random.Random(f"{seed} {rank}").sample(range(len(own)), count)
        picks.append([own[i] for i in sorted(chosen)])
    return picks


def packed(picks: Sequence[Sequence[Pick]], max_tokens: int, device: torch.device) -> list[PackedBatch]:
    """Micro-batches of the picked sequences, those of rank r at every ``len(picks)``-th place from r; empty ones where a rank has fewer."""
    columns, nothing = [_bins(own, max_tokens) for own in picks], to_device(empty_batch(), device)
    return [bins[row] if row < len(bins) else nothing for row in range(max(map(len, columns))) for bins in columns]


def _bins(picks: Sequence[Pick], max_tokens: int) -> list[PackedBatch]:
    """Next-fit, as the step's own micro-batches."""
    bins: list[list[Pick]] = []
    used = max_tokens + 1
    for batch, index in picks:
        length = int(batch.cu_seqlens[index + 1] - batch.cu_seqlens[index])
        if used + length > max_tokens:
            bins.append([])
            used = 0
        bins[-1].append((batch, index))
        used += length
    return [_joined(own) for own in bins]


def _joined(picks: Sequence[Pick]) -> PackedBatch:
    """The picked sequences as one micro-batch; every per-token field comes along."""
    spans = [(b, int(b.cu_seqlens[i]), int(b.cu_seqlens[i + 1])) for b, i in picks]
    ends = torch.tensor([0, *(end - start for _, start, end in spans)]).cumsum(0)
    values = {"cu_seqlens": ends.to(picks[0][0].cu_seqlens)}
    for name in (f.name for f in fields(PackedBatch) if f.name != "cu_seqlens"):
        if getattr(picks[0][0], name) is not None:
            values[name] = torch.cat([getattr(b, name)[start:end] for b, start, end in spans])
    return PackedBatch(**values)


def differing(batch: PackedBatch, log_probs_T: torch.Tensor) -> int:
    """Sequences of which a trained token has other bits in the trainer's log-probs than in the engine's."""
    ours, theirs = (values.float().cpu().contiguous().view(torch.int32) for values in (log_probs_T, batch.rollout_log_probs))
    sequences = Sequences.of(batch.loss_mask.cpu(), batch.cu_seqlens.cpu())
    return int((sequences.sum((ours != theirs).to(torch.int64)) > 0).sum())
