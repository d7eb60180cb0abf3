"""Rewards of a batch of responses: one or several functions, weighted, in this process or in workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from e2e_fp8.config.task import TaskConfig
from e2e_fp8.errors import DataError
from e2e_fp8.tasks.reward_model import reward_model_rewards
from e2e_fp8.tasks.rewards import reward_functions, strict_score
from e2e_fp8.tasks.worker_pool import WorkerPool
from e2e_fp8.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of responses, in their order."""

    rewards: list[float]
    """Weighted sums, finite; 0 for a response whose rewards ran out of time."""
    parts: dict[str, list[float]]
    """Unweighted values by the last part of the metric name (``reward/part/*``); without those that ran out of time."""
    timeouts: int


class Scorer:
    """Computes the rewards that ``task`` asks for.

    Raises:
        ConfigError: a user's function cannot be imported.
    """

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._functions = reward_functions(task)
        self._weights = list(task.reward_weights.values()) or [1.0]
        self._pool = WorkerPool(task) if task.reward_workers else None

    def score_all(self, responses: Sequence[tuple[Prompt, str]]) -> Scores:
        """Rewards of all ``(prompt, response text)``.

        Raises:
            DataError: a reward failed or is not finite, or ran out of time with on_reward_timeout=refuse; names the prompt.
        """
        if self._pool is not None:
            values = self._pool.score_parts(responses)
        else:
            columns = [self._column(name, responses) for name in self._functions]
            values = [list(row) for row in zip(*columns, strict=True)]
        late = [prompt.uid for (prompt, _), parts in zip(responses, values, strict=True) if parts is None]
        if late and self._task.on_reward_timeout == "refuse":
            raise DataError(
                f"the reward of prompt {late[0]} took longer than task.reward_timeout_s {self._task.reward_timeout_s:g} and was killed "
                f"({len(late)} of {len(values)} responses); raise it, fix the reward, or set task.on_reward_timeout to zero."
            )
        done = [parts for parts in values if parts is not None]
        return Scores(
            rewards=[0.0 if parts is None else self._total(parts) for parts in values],
            parts={name: [parts[i] for parts in done] for i, name in enumerate(part_names(list(self._functions)))},
            timeouts=len(late),
        )

    def _column(self, name: str, responses: Sequence[tuple[Prompt, str]]) -> list[float]:
        """One reward of all responses, in this process; requests to a served reward model are sent side by side."""
        if name == "reward_model":
            return reward_model_rewards(responses, self._task.reward_model)
        return [strict_score(self._functions[name], prompt, text) for prompt, text in responses]

    def _total(self, parts: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(self._weights, parts, strict=True))

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.close()


def part_names(rewards: Sequence[str]) -> list[str]:
    """Last part of each reward's metric name: its own, or ``user_1`` and so on for import paths."""
    users = [name for name in rewards if ":" in name]
    return [f"user_{users.index(name) + 1}" if name in users else name for name in rewards]
