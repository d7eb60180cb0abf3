"""Which prompts a step sees: a seeded permutation per epoch, so the step number alone is the data position."""

import random
from collections.abc import Sequence

from e2e_fp8.types import Prompt


def prompts_of_step(prompts: Sequence[Prompt], step: int, count: int, seed: int) -> list[Prompt]:
    """The ``count`` prompts of 0-based ``step``; epochs are reshuffled and follow each other without a gap."""
    chosen: list[Prompt] = []
    position = step * count
    while len(chosen) < count:
        epoch, offset = divmod(position + len(chosen), len(prompts))
        order = list(range(len(prompts)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        take = min(count - len(chosen), len(prompts) - offset)
        chosen += [prompts[i] for i in order[offset : offset + take]]
    return chosen


def generation_seed(seed: int, step: int) -> int:
    """Seed of all samples of one step; distinct for every step and for evaluation (negative steps)."""
    return (seed * 1_000_003 + (step + 1) * 7919) % (2**31 - 1)
