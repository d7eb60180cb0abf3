"""pass@k: the chance that at least one of k samples of a prompt passes, estimated from n >= k samples of it.

With c of n samples passing, 1 - C(n - c, k) / C(n, k) is the share of the k-subsets of the n samples that hold a passing one, so
its expectation over samples is exactly pass@k; 1 - (1 - c / n)^k is biased. Chen et al. 2021, arXiv 2107.03374, equation 1.
"""

import math
from collections.abc import Sequence
from fractions import Fraction


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
