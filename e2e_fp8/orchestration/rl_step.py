"""One reinforcement-learning step: roll out, reward, old log-probs and values, correction, updates, sync."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from e2e_fp8.config.root import Config
from e2e_fp8.correction.apply import correct
from e2e_fp8.errors import EngineError
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.batching import regrouped
from e2e_fp8.orchestration.collect import collect
from e2e_fp8.orchestration.critic import update_critic
from e2e_fp8.orchestration.memory_probe import memory_metrics
from e2e_fp8.orchestration.ranks.loss_recipe import PolicyLoss
from e2e_fp8.orchestration.replay import changed_metrics
from e2e_fp8.orchestration.scoring import mismatch, score
from e2e_fp8.orchestration.session import Session
from e2e_fp8.orchestration.shadow_pass import ShadowPass
from e2e_fp8.orchestration.warm_start import warmed_up
from e2e_fp8.orchestration.weight_sync import SyncReport
from e2e_fp8.protocols import LossFn, TrainEngine
from e2e_fp8.types import PackedBatch, Sample, StepReport, TokenStats
from e2e_fp8.update.aggregation import loss_denominator
from e2e_fp8.update.loss_fn import TRAINED_TOKENS


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one RL step produced."""

    record: dict[str, float]
    samples: list[Sample]
    sync: SyncReport


def run_step(
    session: Session, step: int, timer: PhaseTimer, sampling: AbstractContextManager[None] | None = None, *, census: bool
) -> StepOutcome:
    """One whole step from the current weights; the engine holds the new weights at the end.

    ``sampling`` is entered around rollout and rewards, after which the weights change. With ``census``, tile statistics of the update
    are added to the record (slower).
    """
    cfg, trained_version = session.cfg, session.trainer.policy_version
    with sampling or nullcontext():
        collected = collect(session, step, timer)
    try:
        update = _train_on(session, step, collected.kept, timer, census=census) if collected.kept else _nothing_to_train_on(session)
        with timer("sync"):
            sync = session.sync()
    except BaseException:
        # what follows, a checkpoint perhaps, must not keep the engine waiting
        with suppress(EngineError):
            session.disarm()
        raise
    record = collected.metrics | update | timer.metrics()
    record["rollout/tokens_per_s"] = record["tokens/rollout"] / max(record["time/rollout"], 1e-9)
    if "time/update" in record:
        record["train/tokens_per_s"] = record["tokens/train"] / max(record["time/update"], 1e-9)
    record["staleness/max"] = float(trained_version - min(s.policy_version for s in collected.sampled))
    hit_rate = session.start_rollout().prefix_cache_hit_rate
    if hit_rate is not None:
        record["rollout/prefix_cache_hit_rate"] = hit_rate
    record |= memory_metrics(session)
    record["phase"] = 1.0
    record["policy_version"] = float(session.trainer.policy_version)
    record["learning_rate"] = _learning_rate(cfg, step)
    # last, since bytes may be compared meanwhile
    sync = sync.settled()
    return StepOutcome(record=record | _sync_metrics(sync), samples=collected.sampled, sync=sync)


def _learning_rate(cfg: Config, step: int) -> float:
    """Of the policy in RL step ``step``, from 0: its warm-up begins with its first update, after the critic's own; 0 before."""
    updates = step - _critic_steps(cfg)
    return warmed_up(cfg.training.learning_rate, updates, cfg.training.warmup_steps) if updates >= 0 else 0.0


def _critic_steps(cfg: Config) -> int:
    """First RL steps in which the critic alone is trained."""
    return cfg.objective.critic.critic_warmup if cfg.objective.advantage == "gae" else 0


def _nothing_to_train_on(session: Session) -> dict[str, float]:
    """Dynamic sampling found no group with a learning signal: every optimizer step is skipped and counted."""
    return {"skipped_steps": float(session.cfg.training.minibatches_per_step), "grad_norm": 0.0, "tokens/train": 0.0, "tokens/trained": 0.0}


def _train_on(session: Session, step: int, samples: Sequence[Sample], timer: PhaseTimer, *, census: bool) -> dict[str, float]:
    """Old log-probs, advantages, correction and update; metrics of all of them."""
    cfg = session.cfg
    with timer("old_log_probs"):
        scored = score(session, samples, timer)
        minibatches, record = scored.minibatches, dict(scored.metrics)
        if scored.measured is not None:
            found, stats = scored.measured.batches, scored.measured.stats
            record |= mismatch(found, [s.log_probs for s in stats], cfg.correction.mismatch_threshold)
            record["entropy"] = _entropy(found, stats)
        if not cfg.correction.bypass_mode:
            corrected, metrics = correct(scored.batches, [b.old_log_probs for b in scored.batches], cfg.correction)
            minibatches, record = regrouped(corrected, minibatches), record | metrics
    record["tokens/train"] = float(sum(b.token_ids.numel() for b in scored.batches))
    if session.critic is not None:
        with timer("update_critic"):
            record |= update_critic(session.critic, scored.minibatches, cfg)
    if step < _critic_steps(cfg):
        return record | {TRAINED_TOKENS: 0.0}
    shadow = ShadowPass(cfg.objective, session.trainer, minibatches, session.clip_state, timer)
    with timer("update"):
        run = _update_with_census if census else _update
        record |= run(session, step, minibatches, shadow, scored.audit_passed)
    session.clip_state = shadow.state
    replayed = changed_metrics(session.trainer.take_replay_counts())
    # in bypass mode the update is the first to replay; otherwise its weights move between the counts
    record |= replayed if scored.measured is None else {}
    return record | shadow.metrics()


def _update(session: Session, step: int, minibatches: list[list[PackedBatch]], shadow: ShadowPass, audit_passed: bool) -> dict[str, float]:
    """One optimizer step per mini-batch, and the metrics of all. ``audit_passed``: the first needs no pass to be corrected."""
    cfg = session.cfg
    session.trainer.set_learning_rate(_learning_rate(cfg, step))
    reports: list[StepReport] = []
    corrections: list[dict[str, float]] = []
    trained = 0.0
    for index, part in enumerate(minibatches):
        if cfg.correction.bypass_mode and cfg.correction.corrects:
            # Against the rollout policy as the weights are now; the loss's own forward gives the same log-probs.
            known = audit_passed and index == 0
            log_probs = [b.rollout_log_probs for b in part] if known else [s.log_probs for s in session.trainer.token_stats(part)]
            part, metrics = correct(part, log_probs, cfg.correction)
            corrections.append(metrics if known else metrics | mismatch(part, log_probs, cfg.correction.mismatch_threshold))
        objective = shadow.objective_for(index, part)
        loss_fn = PolicyLoss(objective=objective, correction=cfg.correction, max_response_tokens=cfg.rollout.max_response_tokens)
        trained += float(sum(b.trained_mask.sum() for b in part))
        denominator = loss_denominator(part, cfg.objective.loss_agg_mode)
        if index + 1 == len(minibatches) and denominator:
            # nothing but this step comes before the sync
            session.arm()
        reports.append(optimizer_step(session.trainer, part, loss_fn, denominator))
    return mean_of(corrections) | _update_metrics(reports) | {TRAINED_TOKENS: trained}


def optimizer_step(trainer: TrainEngine, part: list[PackedBatch], loss_fn: LossFn, denominator: float) -> StepReport:
    """One optimizer step, or a skipped one when the correction rejected every token of ``part``: there is nothing to divide by."""
    if denominator == 0:
        return StepReport(metrics={}, grad_norm=0.0, skipped=True)
    return trainer.train_step(part, loss_fn, denominator)


def _update_with_census(
    session: Session, step: int, minibatches: list[list[PackedBatch]], shadow: ShadowPass, audit_passed: bool
) -> dict[str, float]:
    """The same, with tile statistics of the update's own passes."""
    with session.census() as census:
        update = _update(session, step, minibatches, shadow, audit_passed)
    return update | census.record()


def mean_of(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the records that have it."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Means over the optimizer steps that ran. The engine divided by the loss's denominator; token metrics are per trained token."""
    per_token = []
    for metrics in (r.metrics for r in reports if r.metrics):
        tokens = metrics[TRAINED_TOKENS]
        per_token.append({n: v if n == "loss" else v / tokens for n, v in metrics.items() if n != TRAINED_TOKENS})
    record = mean_of(per_token)
    record["grad_norm"] = max(r.grad_norm for r in reports)
    record["skipped_steps"] = float(sum(r.skipped for r in reports))
    return record


def _entropy(batches: Sequence[PackedBatch], stats: Sequence[TokenStats]) -> float:
    total = sum(float((s.entropy * b.loss_mask).sum()) for b, s in zip(batches, stats, strict=True))
    return total / max(sum(float(b.loss_mask.sum()) for b in batches), 1.0)


def _sync_metrics(sync: SyncReport) -> dict[str, float]:
    record = {"sync/bytes": float(sync.num_bytes), "sync/seconds": sync.seconds, "time/receipt": sync.receipt_wait}
    record |= {"time/sync": sync.seconds + sync.answer_seconds, "sync/answer_seconds": sync.answer_seconds, "sync/armed": float(sync.armed)}
    return record | sync.receipt_metrics
