"""Supervised warm start: a tiny model from scratch must answer sometimes before its rewards can differ."""

import time
from collections.abc import Callable

from e2e_fp8.orchestration.batching import pack_supervised
from e2e_fp8.orchestration.data_order import prompts_of_step
from e2e_fp8.orchestration.ranks.loss_recipe import SupervisedLoss
from e2e_fp8.orchestration.session import Session


def warmed_up(peak: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up to ``peak`` over ``warmup_steps``, constant afterwards; ``step`` counts from 0."""
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak


def warm_start_step(session: Session, step: int) -> dict[str, float]:
    """One optimizer step on reference answers; returns its metric record."""
    cfg, task = session.cfg, session.task
    warm = cfg.training.warm_start
    started = time.perf_counter()
    prompts = prompts_of_step(task.train, step, warm.batch_size, cfg.run.seed)
    batches = pack_supervised(
        prompts,
        [task.tokenizer.encode_answer(p.answer) for p in prompts],
        eos_token_id=task.tokenizer.eos_token_id,
        max_tokens=cfg.training.max_tokens_per_microbatch,
        shares=session.trainer.grid.data,
        device=session.trainer.device,
    )
    tokens = float(sum(b.loss_mask.sum() for b in batches))
    # cosine decay over the second half: the end of the warm start is what RL starts from
    rate = warmed_up(warm.learning_rate, step, warm.warmup_steps) * decay(step, warm.steps)
    session.trainer.set_learning_rate(rate)
    report = session.trainer.train_step(batches, SupervisedLoss(), tokens)
    seconds = time.perf_counter() - started
    return {
        "phase": 0.0,
        "sft/step": float(step + 1),
        "sft/loss": report.metrics["loss"],
        "grad_norm": report.grad_norm,
        "learning_rate": rate,
        "tokens/train": float(sum(b.token_ids.numel() for b in batches)),
        "time/update": seconds,
        "policy_version": float(session.trainer.policy_version),
    }


def decay(step: int, steps: int) -> float:
    """Linear from 1 to 0.1 over the last half of ``steps``."""
    half = steps / 2
    return 1.0 if step < half else 1.0 - 0.9 * (step - half) / max(half, 1.0)


def warm_start(session: Session, first_step: int, on_step: Callable[[int, dict[str, float]], None]) -> None:
    """All remaining supervised steps; ``on_step(step, record)`` after each."""
    for step in range(first_step, session.cfg.training.warm_start.steps):
        on_step(step, warm_start_step(session, step))
