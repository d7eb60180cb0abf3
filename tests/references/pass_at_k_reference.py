"""pass@k by counting every subset."""

from fractions import Fraction
from itertools import combinations


def pass_at_k_by_enumeration(passes: list[bool], k: int) -> Fraction:
    """Share of the k-subsets of samples with at least one that passes."""
    subsets = list(combinations(passes, k))
    return Fraction(sum(any(s) for s in subsets), len(subsets))
