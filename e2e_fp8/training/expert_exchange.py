"""Rows of tokens to the ranks of their experts and back, for experts whose operators the engine shares.

A row is computed alone, whichever rows lie beside it, and comes back to its token, which sums its k rows in their order. So a token has the
bits that one rank with all experts gives it. Legend: ``A`` this rank's assignments, ``B`` those that its experts got from all ranks, ``E``
experts of the model, ``R`` expert-parallel ranks, ``L = E / R`` experts of one.
"""

from typing import Any

import torch
import torch.distributed as dist


class ExpertExchange:
    """The way there and back of one forward pass. Collective over ``group``.

    ``counts_E`` (int64) are this rank's assignments of each expert; rows come sorted by expert.
    """

    def __init__(self, group: Any, counts_E: torch.Tensor) -> None:
        ranks, mine = group.size(), group.rank()
        counts_RE = torch.empty(ranks * len(counts_E), dtype=counts_E.dtype, device=counts_E.device)
        dist.all_gather_into_tensor(counts_RE, counts_E.contiguous(), group=group)
        counts_RRL = counts_RE.view(ranks, ranks, -1)
        received_RL = counts_RRL[:, mine]
        self._group = group
        self._sent: list[int] = counts_RRL[mine].sum(1).tolist()
        self._received: list[int] = received_RL.sum(1).tolist()
        self.counts: list[int] = received_RL.sum(0).tolist()
        """Rows of each of this rank's experts."""
        experts = torch.arange(received_RL.shape[1], device=counts_E.device).repeat(ranks)
        # by expert, then source rank, then the order there
        self._order_B = experts.repeat_interleave(received_RL.reshape(-1)).argsort(stable=True)

    def there(self, rows_A: torch.Tensor) -> torch.Tensor:
        """``[A, ...]`` sorted by expert of the model -> ``[B, ...]`` sorted by expert of this rank; differentiable."""
        return _all_to_all(self._group, rows_A, self._received, self._sent)[self._order_B]

    def back(self, rows_B: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`there`."""
        return _all_to_all(self._group, rows_B[self._order_B.argsort()], self._sent, self._received)


def _all_to_all(group: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    from megatron.core.tensor_parallel import all_to_all

    return all_to_all(group, rows, received, sent)
