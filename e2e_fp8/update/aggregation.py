"""One denominator rule: a loss function returns the sum over its micro-batch of weighted token losses, and the engine divides by one
number for the whole optimizer step. A token's weight depends on its own sequence alone, which a loss sees whole on every rank that has a
part of it, so the result is the same for every way of cutting a batch into micro-batches and ranks.

| mode | weight of a token of sequence i | denominator |
|---|---|---|
| token-mean | 1 | trained tokens |
| seq-mean-token-mean | 1 / tokens of i | sequences |
| seq-mean-token-sum | 1 | sequences |
| seq-mean-token-sum-norm | 1 / norm | sequences |

Tokens are trained ones that were not rejected, sequences those with at least one of them.
"""

from collections.abc import Sequence

import torch

from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.types import PackedBatch


def token_sum(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Scalar sum over trained tokens of ``[T]`` values; those outside the mask, nan included, do not enter."""
    return torch.where(mask_T > 0, values_T, torch.zeros_like(values_T)).sum()


def aggregated_sum(values_T: torch.Tensor, sequences: Sequences, mode: str, norm: float) -> torch.Tensor:
    """Scalar sum of ``[T]`` values by the table's weights."""
    if mode == "seq-mean-token-mean":
        return sequences.mean(values_T).sum()
    total = token_sum(values_T, sequences.trained)
    return total / norm if mode == "seq-mean-token-sum-norm" else total


def loss_denominator(batches: Sequence[PackedBatch], mode: str) -> float:
    """Denominator of one optimizer step over all its micro-batches; 0 when no token is trained."""
    if mode == "token-mean":
        return float(sum(b.trained_mask.sum() for b in batches))
    return float(sum((Sequences.of(b.trained_mask, b.cu_seqlens).lengths > 0).sum() for b in batches))
