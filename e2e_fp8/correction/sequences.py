"""Sums over the sequences of a packed axis. Legend: T packed tokens, S sequences."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Which packed token belongs to which sequence, and which are trained."""

    ids: torch.Tensor
    """int64 ``[T]``: sequence of each token."""
    trained: torch.Tensor
    """bool ``[T]``."""
    lengths: torch.Tensor
    """float64 ``[S]``: trained tokens of each sequence."""

    @classmethod
    def of(cls, mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> "Sequences":
        """Raises ValueError when ``cu_seqlens`` does not end at T."""
        if int(cu_seqlens_S1[-1]) != mask_T.numel():
            raise ValueError(f"cu_seqlens ends at {int(cu_seqlens_S1[-1])}, not at {mask_T.numel()} tokens")
        count = len(cu_seqlens_S1) - 1
        ids = torch.repeat_interleave(torch.arange(count, device=mask_T.device), cu_seqlens_S1.diff().to(mask_T.device))
        trained = mask_T > 0
        lengths = torch.zeros(count, dtype=torch.float64, device=mask_T.device).index_add_(0, ids, trained.double())
        return cls(ids=ids, trained=trained, lengths=lengths)

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """``[S]`` sums over trained tokens, with gradient."""
        values = torch.where(self.trained, values_T, torch.zeros_like(values_T))
        return torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device).index_add(0, self.ids, values)

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """``[S]`` means over trained tokens, with gradient; 0 for a sequence without any."""
        return self.sum(values_T) / self.lengths.clamp_min(1.0).to(values_T.dtype)

    def max(self, values_T: torch.Tensor) -> torch.Tensor:
        """``[S]`` largest trained values, nan if one is; 0 for a sequence without any. Values are not negative."""
        values = torch.where(self.trained, values_T, torch.zeros_like(values_T))
        return torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device).scatter_reduce(0, self.ids, values, "amax")

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """``[T]``: each token's sequence's value."""
        return values_S[self.ids]
