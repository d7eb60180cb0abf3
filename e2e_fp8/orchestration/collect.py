"""Samples of one step, with rewards: one round of rollout, or DAPO's dynamic sampling over several.

With ``objective.dynamic_sampling`` a step owns ``dynamic_sampling_rounds`` blocks of the prompt order and of the seeds, used or not:
what it samples is a function of the step number, so a resumed run continues bit for bit. Each round samples a whole block, as DAPO
does; groups whose rewards are all equal are dropped, and so are the groups beyond ``rollout.prompts_per_step``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.data_order import generation_seed, prompts_of_step
from e2e_fp8.orchestration.session import Session
from e2e_fp8.tasks.scoring import Scores
from e2e_fp8.types import Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Samples of one step."""

    sampled: list[Sample]
    """All, in order of rounds; ``reward`` is the verifier's."""
    kept: list[Sample]
    """Those to train on, whole groups, ``group_id`` counting from 0."""
    metrics: dict[str, float]


def collect(session: Session, step: int, timer: PhaseTimer) -> Collected:
    """Roll out and reward the samples of 0-based ``step``; the engine sleeps afterwards."""
    cfg, rollout = session.cfg, session.start_rollout()
    count = cfg.rollout.prompts_per_step
    dynamic = cfg.objective.dynamic_sampling
    rounds = cfg.objective.dynamic_sampling_rounds if dynamic else 1
    scores: list[Scores] = []

    def sample(index: int) -> list[Sample]:
        block = step * rounds + index
        with timer("rollout"):
            samples = session.generate(
                _prompts(session, block), group_size=cfg.rollout.group_size, seed=generation_seed(cfg.run.seed, block)
            )
        with timer("reward"):
            scores.append(session.task.score_all([(s.prompt, s.response_text) for s in samples]))
        return [replace(s, reward=reward) for s, reward in zip(samples, scores[-1].rewards, strict=True)]

    collected = refill(sample, wanted=count, rounds=rounds) if dynamic else all_groups(sample(0))
    with timer("rollout"):
        rollout.sleep()
    # with a critic, equal rewards are no loss of signal
    groups = {n: v for n, v in collected.metrics.items() if n != "groups/degenerate" or cfg.objective.advantage == "group"}
    metrics = groups | _sample_metrics(collected.sampled) | _part_metrics(scores)
    if session.task.curriculum is not None:
        passed = [s.reward >= cfg.task.curriculum.pass_reward for s in collected.sampled]
        metrics |= session.task.curriculum.observe([s.prompt for s in collected.sampled], passed)
    return replace(collected, metrics=metrics)


def _prompts(session: Session, block: int) -> list[Prompt]:
    """Prompts of one block: a function of seed and block, and with a curriculum of its levels too."""
    count, seed, curriculum = session.cfg.rollout.prompts_per_step, session.cfg.run.seed, session.task.curriculum
    return prompts_of_step(session.task.train, block, count, seed) if curriculum is None else curriculum.prompts_of_step(block, count, seed)


def _part_metrics(rounds: Sequence[Scores]) -> dict[str, float]:
    """Means of several rewards by name, and how many ran out of time, over all rounds."""
    timeouts = sum(s.timeouts for s in rounds)
    record = {"reward/timeouts": float(timeouts)} if timeouts else {}
    parts: dict[str, list[float]] = {}
    for scores in rounds:
        for name, values in scores.parts.items():
            parts.setdefault(name, []).extend(values)
    if len(parts) > 1:
        record |= {f"reward/part/{name}": sum(values) / len(values) for name, values in parts.items() if values}
    return record


def all_groups(samples: Sequence[Sample]) -> Collected:
    """Every group is kept, those without a learning signal too."""
    groups = _groups(samples)
    degenerate = sum(is_degenerate(group) for group in groups)
    metrics = {"groups/degenerate": float(degenerate), "groups/total": float(len(groups))}
    return Collected(sampled=list(samples), kept=list(samples), metrics=metrics)


def refill(sample: Callable[[int], Sequence[Sample]], *, wanted: int, rounds: int) -> Collected:
    """Call ``sample`` with 0, 1, ... until ``wanted`` groups have unequal rewards, at most ``rounds`` times.

    Fewer groups, or none, are kept where that was not enough: ``groups/missing`` counts them.
    """
    sampled: list[Sample] = []
    kept: list[list[Sample]] = []
    total = degenerate = index = 0
    while index < rounds and len(kept) < wanted:
        groups = _groups(sample(index))
        informative = [group for group in groups if not is_degenerate(group)]
        sampled += [s for group in groups for s in group]
        kept += informative
        total, degenerate, index = total + len(groups), degenerate + len(groups) - len(informative), index + 1
    used = kept[:wanted]
    metrics = {
        "groups/degenerate": float(degenerate),
        "groups/total": float(total),
        "groups/rounds": float(index),
        "groups/surplus": float(len(kept) - len(used)),
        "groups/missing": float(wanted - len(used)),
    }
    return Collected(sampled=sampled, kept=[replace(s, group_id=i) for i, g in enumerate(used) for s in g], metrics=metrics)


def is_degenerate(group: Sequence[Sample]) -> bool:
    """Whether all rewards are equal."""
    return len({s.reward for s in group}) == 1


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    return [list(group) for _, group in groupby(samples, key=lambda s: s.group_id)]


def _sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = torch.tensor([s.reward for s in samples])
    lengths = torch.tensor([len(s.response_token_ids) for s in samples], dtype=torch.float32)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response/count": float(len(samples)),
        "response/truncated_fraction": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "tokens/rollout": float(lengths.double().sum()),
    }
