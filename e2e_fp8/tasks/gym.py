"""reasoning-gym data sets, one or a mixture with levels, and their verifiers."""

import random
import warnings
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import TaskConfig
from e2e_fp8.errors import ConfigError, DataError

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

Pool = tuple[str, int]
"""Data set name and level."""


def pools_of(task: TaskConfig) -> dict[Pool, dict[str, Any]]:
    """Every data set and level of the task, in order, with the parameters that it is made with."""
    pools = {}
    for name in task.mixture or {task.name: 1.0}:
        params = task.mixture_params.get(name, {}) if task.mixture else task.params
        for level, changed in enumerate(task.curriculum.levels.get(name, [{}])):
            pools[name, level] = {**params, **changed}
    return pools


def make_dataset(name: str, params: dict[str, Any], size: int, seed: int) -> Any:
    """A reasoning-gym data set; entries are made when they are read.

    Raises:
        ConfigError: unknown name or refused parameters.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **{"size": size, "seed": seed, **params})
    except (ValueError, TypeError, AssertionError) as error:
        raise refused(name, params, error) from error


def refused(name: str, params: dict[str, Any], error: Exception) -> ConfigError:
    """What reasoning-gym says against the configuration."""
    return ConfigError(f"task.name {name} with task.params {params}: reasoning-gym refuses them ({error}).")


def gym_entries(task: TaskConfig, pool: Pool) -> list[dict[str, Any]]:
    """Entries of one pool, twice as many as asked for: generators repeat prompts, and the split needs distinct ones.

    Raises:
        ConfigError: unknown name or refused parameters.
    """
    params = pools_of(task)[pool]
    try:
        return list(make_dataset(pool[0], params, 2 * (task.train_size + task.held_out_size), task.seed))
    except (ValueError, TypeError, AssertionError) as error:
        raise refused(pool[0], params, error) from error


def split_pools(pools: dict[Pool, "list[Prompt]"], task: TaskConfig) -> "tuple[dict[Pool, list[Prompt]], list[Prompt]]":
    """(training prompts of each pool, held-out prompts of all): distinct over all pools, shuffled by the task's seed.

    Held-out prompts are shared out as evenly as possible, the first pools take one more.

    Raises:
        DataError: a pool has too few prompts that no earlier one has.
    """
    seen: set[str] = set()
    train, held_out = {}, []
    for index, (pool, prompts) in enumerate(pools.items()):
        distinct = list({p.text: p for p in prompts if p.text not in seen}.values())
        seen |= {p.text for p in distinct}
        share = task.held_out_size // len(pools) + (index < task.held_out_size % len(pools))
        if len(distinct) <= share:
            raise DataError(
                f"the data set {pool[0]} at level {pool[1]} has {len(distinct)} prompts that no earlier pool has, not enough for {share} "
                "held-out prompts and one training prompt; lower task.held_out_size or widen the level's parameters."
            )
        random.Random(f"{task.seed}/{pool[0]}/{pool[1]}").shuffle(distinct)
        held_out += distinct[:share]
        train[pool] = distinct[share:][: task.train_size]
    return train, held_out


class GymVerifier:
    """Each data set's own score of a response; a data set is made on first use."""

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._datasets: dict[Pool, Any] = {}

    def __call__(self, prompt: "Prompt", response_text: str) -> float:
        pool = (prompt.metadata["source"], prompt.metadata["level"])
        if pool not in self._datasets:
            self._datasets[pool] = make_dataset(pool[0], pools_of(self._task)[pool], 1, self._task.seed)
        return self._datasets[pool].score_answer(answer=response_text.strip(), entry=prompt.metadata["entry"])
