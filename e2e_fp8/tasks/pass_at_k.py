"""pass@k: the chance that at least one of k samples of a prompt passes, estimated from n >= k samples of it.

With c of n samples passing, 1 - C(n - c, k) / C(n, k) is the share of the k-subsets of the n samples that hold a passing one, so
its expectation over samples is exactly pass@k; 1 - (1 - c / n)^k is biased. Chen et al. 2021, arXiv 2107.03374, equation 1.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from e2e_fp8.observability.names import PASS_AT_K


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate for one prompt, correctly rounded.

    Raises:
        ValueError: not 1 <= k <= samples or not 0 <= passed <= samples.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples and 0 <= passed <= samples, got k {k}, samples {samples}, passed {passed}")
    return float(1 - Fraction(math.comb(samples - passed, k), math.comb(samples, k)))


def mean_pass_at_k(passes: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts, each with its own samples (``passes[prompt][sample]``)."""
    return math.fsum(pass_at_k(len(p), sum(p), k) for p in passes) / len(passes)


def held_out_record(rewards: Sequence[float], samples_per_prompt: int, pass_reward: float) -> dict[str, float]:
    """Mean reward (avg@k), its standard error, and pass@k for each k of PASS_AT_K that ``samples_per_prompt`` samples allow.

    ``rewards`` has the samples of a prompt side by side. The standard error is over prompts, as samples of one prompt are not
    independent: how much the mean would move with other prompts of the same kind. Not given for a single prompt.
    """
    prompts = [rewards[i : i + samples_per_prompt] for i in range(0, len(rewards), samples_per_prompt)]
    passes = [[reward >= pass_reward for reward in group] for group in prompts]
    means = [math.fsum(group) / len(group) for group in prompts]
    mean = math.fsum(means) / len(means)
    record = {"reward/held_out": mean}
    if len(means) > 1:
        variance = math.fsum((m - mean) ** 2 for m in means) / (len(means) - 1)
        record["reward/held_out_stderr"] = math.sqrt(variance / len(means))
    return record | {f"pass_at_k/{k}": mean_pass_at_k(passes, k) for k in PASS_AT_K if k <= samples_per_prompt}
