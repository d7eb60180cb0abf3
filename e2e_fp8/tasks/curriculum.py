"""Mixtures of data sets and a difficulty level for each that follows the measured success rate.

The level after a step is a function of the success rates of the steps before, and the prompts of a step are a function of seed,
step and levels; the state that a checkpoint keeps is therefore levels and the rates since their last moves.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e_fp8.config.task import CurriculumConfig
from e2e_fp8.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Level:
    """Where one data set stands."""

    level: int = 0
    """Index into its pools, 0 the easiest."""
    recent: tuple[float, ...] = ()
    """Success rates of the steps since the last move, oldest first; fewer than the window."""


def moved(state: Level, success_rate: float, top: int, cfg: CurriculumConfig) -> Level:
    """State after a step in which the share ``success_rate`` of the data set's responses passed; ``top`` is the last level.

    A window of steps decides together: up above ``raise_above``, down below ``lower_below``, else the oldest step is forgotten.
    """
    recent = (*state.recent, success_rate)
    if len(recent) < cfg.window:
        return Level(level=state.level, recent=recent)
    rate = math.fsum(recent) / len(recent)
    if rate > cfg.raise_above and state.level < top:
        return Level(level=state.level + 1)
    if rate < cfg.lower_below and state.level > 0:
        return Level(level=state.level - 1)
    return Level(level=state.level, recent=recent[1:])


@dataclass(kw_only=True)
class Curriculum:
    """Training prompts of several data sets, each in pools from easy to hard."""

    pools: Mapping[str, Sequence[Sequence[Prompt]]]
    """Data set to its levels to their prompts; none empty."""
    weights: Mapping[str, float]
    """Share of a step's prompts, up to a common factor."""
    cfg: CurriculumConfig
    levels: dict[str, Level] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = {name: Level() for name in self.pools} | self.levels

    def prompts_of_step(self, step: int, count: int, seed: int) -> list[Prompt]:
        """``count`` prompts: data sets drawn by weight, prompts without repetition while the level's pool lasts."""
        draw = random.Random(f"{seed}/mixture/{step}")
        names = draw.choices(list(self.weights), weights=list(self.weights.values()), k=count)
        queues: dict[str, list[Prompt]] = {}
        chosen = []
        for name in names:
            queue = queues.setdefault(name, [])
            if not queue:
                pool = self.pools[name][self.levels[name].level]
                queue += draw.sample(pool, len(pool))
            chosen.append(queue.pop())
        return chosen

    def observe(self, prompts: Sequence[Prompt], passed: Sequence[bool]) -> dict[str, float]:
        """Move the levels by the responses of a step; metrics of the step, with the levels that it was drawn at."""
        record = {
            "curriculum/level_mean": math.fsum(s.level for s in self.levels.values()) / len(self.levels),
            "curriculum/success_rate": sum(passed) / len(passed),
        }
        for name, state in self.levels.items():
            results = [ok for prompt, ok in zip(prompts, passed, strict=True) if prompt.metadata["source"] == name]
            if results:
                self.levels[name] = moved(state, sum(results) / len(results), len(self.pools[name]) - 1, self.cfg)
        return record

    def state_dict(self) -> dict[str, Any]:
        """Levels and recent rates by data set."""
        return {name: {"level": state.level, "recent": list(state.recent)} for name, state in self.levels.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken."""
        self.levels = {name: Level(level=int(v["level"]), recent=tuple(v["recent"])) for name, v in state.items()}
