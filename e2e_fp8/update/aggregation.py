"""One denominator rule: a loss function returns the sum over its micro-batch, and the engine divides by the whole batch's token
count. Token-mean is then the same number for every way of cutting a batch into micro-batches."""

import torch


def token_sum(values_T: torch.Tensor, loss_mask_T: torch.Tensor) -> torch.Tensor:
    """Scalar sum over trained tokens of ``[T]`` values; those outside the mask, nan included, do not enter."""
    return torch.where(loss_mask_T > 0, values_T, torch.zeros_like(values_T)).sum()
