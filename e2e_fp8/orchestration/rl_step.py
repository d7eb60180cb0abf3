"""One reinforcement-learning step: roll out, reward, old log-probs, correction, update, sync."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from e2e_fp8.correction.diagnostics import mismatch_metrics
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import minibatch_slices, pack_samples, with_old_log_probs
from e2e_fp8.orchestration.data_order import generation_seed, prompts_of_step
from e2e_fp8.orchestration.session import Session
from e2e_fp8.orchestration.warm_start import warmed_up
from e2e_fp8.orchestration.weight_sync import SyncReport
from e2e_fp8.tasks.scoring import Scores
from e2e_fp8.training.tile_census import TileCensus
from e2e_fp8.types import PackedBatch, Prompt, Sample, StepReport, TokenStats
from e2e_fp8.update.advantages import GroupStats, group_advantages
from e2e_fp8.update.loss_fn import make_loss_fn


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one RL step produced."""

    record: dict[str, float]
    samples: list[Sample]
    sync: SyncReport


def run_step(session: Session, step: int, timer: PhaseTimer, *, census: bool) -> StepOutcome:
    """One whole step from the current weights; the engine holds the new weights at the end.

    With ``census``, tile statistics of the update are added to the record (slower).
    """
    cfg = session.cfg
    rollout = session.start_rollout()
    trained_version = session.trainer.policy_version
    with timer("rollout"):
        prompts = _prompts(session, step)
        samples = session.generate(prompts, group_size=cfg.rollout.group_size, seed=generation_seed(cfg.run.seed, step))
        rollout.sleep()
    with timer("reward"):
        scores = session.task.score_all([(s.prompt, s.response_text) for s in samples])
        samples = [replace(s, reward=reward) for s, reward in zip(samples, scores.rewards, strict=True)]
    advantages, groups = group_advantages(
        torch.tensor([s.reward for s in samples]),
        torch.tensor([s.group_id for s in samples]),
        normalize_by_std=cfg.objective.normalize_by_std,
        eps=cfg.objective.advantage_eps,
    )
    with timer("old_log_probs"):
        scored = [_score(session, part, timer) for part in _pack(session, samples, advantages)]
        minibatches = [batches for batches, _ in scored]
        batches, stats = [b for part in minibatches for b in part], [s for _, part in scored for s in part]
    mismatch = _mismatch(batches, cfg.correction.rollout_is_threshold)
    with timer("update"):
        reports, tiles = _update_with_census(session, step, minibatches) if census else (_update(session, step, minibatches), {})
    with timer("sync"):
        sync = session.sync()
    record = _rollout_metrics(samples, groups) | _part_metrics(scores) | mismatch | _update_metrics(reports) | tiles
    record["entropy"] = _entropy(batches, stats)
    record |= _cost_metrics(samples, batches, timer, sync)
    if session.task.curriculum is not None:
        passed = [s.reward >= cfg.task.curriculum.pass_reward for s in samples]
        record |= session.task.curriculum.observe([s.prompt for s in samples], passed)
    record["staleness/max"] = float(trained_version - min(s.policy_version for s in samples))
    record |= _advantage_metrics(samples, advantages)
    if rollout.prefix_cache_hit_rate is not None:
        record["rollout/prefix_cache_hit_rate"] = rollout.prefix_cache_hit_rate
    record["phase"] = 1.0
    record["policy_version"] = float(session.trainer.policy_version)
    record["learning_rate"] = warmed_up(cfg.training.learning_rate, step, cfg.training.warmup_steps)
    return StepOutcome(record=record, samples=samples, sync=sync)


def _prompts(session: Session, step: int) -> list[Prompt]:
    """Prompts of a step: a function of seed and step, and with a curriculum of its levels too."""
    count, seed, curriculum = session.cfg.rollout.prompts_per_step, session.cfg.run.seed, session.task.curriculum
    return prompts_of_step(session.task.train, step, count, seed) if curriculum is None else curriculum.prompts_of_step(step, count, seed)


def _pack(session: Session, samples: Sequence[Sample], advantages: torch.Tensor) -> list[list[PackedBatch]]:
    """Micro-batches of each mini-batch; groups stay whole."""
    training = session.cfg.training
    slices = minibatch_slices([s.group_id for s in samples], training.minibatches_per_step)
    return [
        pack_samples(samples[part], advantages[part], max_tokens=training.max_tokens_per_microbatch, device=session.trainer.device)
        for part in slices
    ]


def _score(session: Session, batches: list[PackedBatch], timer: PhaseTimer) -> tuple[list[PackedBatch], list[TokenStats]]:
    """Add the trainer's old log-probs, and the reference policy's where the KL term needs them."""
    stats = session.trainer.token_stats(batches)
    batches = [with_old_log_probs(b, s.log_probs) for b, s in zip(batches, stats, strict=True)]
    if session.reference is not None:
        with timer("reference"):
            reference = session.reference.token_stats(batches)
        batches = [replace(b, ref_log_probs=r.log_probs * b.loss_mask) for b, r in zip(batches, reference, strict=True)]
    return batches, stats


def _update(session: Session, step: int, minibatches: list[list[PackedBatch]]) -> list[StepReport]:
    """One optimizer step per mini-batch."""
    cfg = session.cfg
    session.trainer.set_learning_rate(warmed_up(cfg.training.learning_rate, step, cfg.training.warmup_steps))
    loss_fn = make_loss_fn(cfg.objective, cfg.correction)
    return [session.trainer.train_step(part, loss_fn, float(sum(b.loss_mask.sum() for b in part))) for part in minibatches]


def _update_with_census(session: Session, step: int, minibatches: list[list[PackedBatch]]) -> tuple[list[StepReport], dict[str, float]]:
    plan = QuantizationPlan.from_config(session.cfg)
    with TileCensus(session.trainer.model, plan) as census:
        for name, weight in session.trainer.named_masters():
            if weight.dim() == 2 and ".linear_" in name:
                census.count_weight(weight.to(torch.bfloat16))
        reports = _update(session, step, minibatches)
    return reports, census.record()


def _mismatch(batches: Sequence[PackedBatch], threshold: float) -> dict[str, float]:
    """verl's ``rollout_corr/*`` over all response tokens of the step."""
    offsets, total = [torch.zeros(1, dtype=torch.int64)], 0
    for batch in batches:
        offsets.append(batch.cu_seqlens[1:].cpu().to(torch.int64) + total)
        total += batch.token_ids.numel()
    return mismatch_metrics(
        torch.cat([b.old_log_probs.cpu() for b in batches]),
        torch.cat([b.rollout_log_probs.cpu() for b in batches]),
        torch.cat([b.loss_mask.cpu() for b in batches]),
        torch.cat(offsets),
        threshold,
    )


def _rollout_metrics(samples: Sequence[Sample], groups: GroupStats) -> dict[str, float]:
    rewards = torch.tensor([s.reward for s in samples])
    lengths = torch.tensor([len(s.response_token_ids) for s in samples], dtype=torch.float32)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response/truncated_fraction": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "groups/degenerate": float(groups.degenerate),
        "groups/total": float(groups.total),
    }


def _part_metrics(scores: Scores) -> dict[str, float]:
    """Means of several rewards by name, and how many ran out of time."""
    record = {"reward/timeouts": float(scores.timeouts)} if scores.timeouts else {}
    if len(scores.parts) > 1:
        record |= {f"reward/part/{name}": sum(values) / len(values) for name, values in scores.parts.items() if values}
    return record


def _advantage_metrics(samples: Sequence[Sample], advantages: torch.Tensor) -> dict[str, float]:
    """Mean |advantage| of responses longer than the median over that of the others; nothing when either side has none."""
    lengths = torch.tensor([len(s.response_token_ids) for s in samples])
    long, magnitude = lengths > lengths.median(), advantages.abs()
    if not bool(long.any()) or not float(magnitude[~long].sum()):
        return {}
    return {"advantages/long_to_short": float(magnitude[long].mean() / magnitude[~long].mean())}


def _update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    keys = reports[0].metrics.keys()
    record = {key: sum(r.metrics[key] for r in reports) / len(reports) for key in keys}
    record["grad_norm"] = max(r.grad_norm for r in reports)
    record["skipped_steps"] = float(sum(r.skipped for r in reports))
    return record


def _entropy(batches: Sequence[PackedBatch], stats: Sequence[TokenStats]) -> float:
    total = sum(float((s.entropy * b.loss_mask).sum()) for b, s in zip(batches, stats, strict=True))
    return total / max(sum(float(b.loss_mask.sum()) for b in batches), 1.0)


def _cost_metrics(samples: Sequence[Sample], batches: Sequence[PackedBatch], timer: PhaseTimer, sync: SyncReport) -> dict[str, float]:
    seconds = timer.seconds()
    rollout_tokens = float(sum(len(s.response_token_ids) for s in samples))
    train_tokens = float(sum(b.token_ids.numel() for b in batches))
    record = {f"time/{phase}": value for phase, value in seconds.items()}
    record |= {
        "tokens/rollout": rollout_tokens,
        "tokens/train": train_tokens,
        "rollout/tokens_per_s": rollout_tokens / max(seconds["rollout"], 1e-9),
        "train/tokens_per_s": train_tokens / max(seconds["update"], 1e-9),
        "sync/bytes": float(sync.num_bytes),
        "sync/seconds": sync.seconds,
        "time/receipt": sync.receipt_seconds,
    }
    record["time/sync"] = sync.seconds
    return record | sync.receipt_metrics
