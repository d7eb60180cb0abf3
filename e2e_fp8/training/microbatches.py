"""Micro-batches of several ranks: which rank takes which, and how all ranks come to run equally many."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.types import PackedBatch


def share_of(batches: Sequence[PackedBatch], index: int, count: int) -> list[PackedBatch]:
    """The ``index``-th of ``count`` data-parallel shares: every ``count``-th micro-batch, so that sizes stay similar."""
    return list(batches[index::count])


def empty_batch() -> PackedBatch:
    """One token outside the loss, for a rank that has fewer micro-batches than another: its gradient is zero."""
    zero = torch.zeros(1)
    return PackedBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        targets=torch.zeros(1, dtype=torch.int64),
        loss_mask=zero,
        advantages=zero,
        rollout_log_probs=zero,
        old_log_probs=zero,
        ref_log_probs=zero,
        values=zero,
        returns=zero,
    )


def even_out(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """``batches`` with empty ones behind, as many as the rank with most has. Collective.

    Experts exchange tokens once a micro-batch, so every rank must run the same number.
    """
    wanted = torch.tensor(len(batches))
    if dist.get_world_size() > 1:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    return [*batches, *(empty_batch() for _ in range(int(wanted) - len(batches)))]


def sum_over(values: dict[str, float], group: Any) -> dict[str, float]:
    """Sums over the ranks of ``group``, added in float64 in rank order; every rank has the same names. Collective."""
    if group.size() == 1:
        return values
    names = sorted(values)
    mine = torch.tensor([values[name] for name in names], dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    totals = [0.0] * len(names)
    for part in found:
        totals = [total + value for total, value in zip(totals, part.tolist(), strict=True)]
    return dict(zip(names, totals, strict=True))


def broadcast_record(values: dict[str, float] | None, source: int, group: Any) -> dict[str, float]:
    """``values`` of the global rank ``source`` on every rank of ``group``, float for float. Collective."""
    payload = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
    size = torch.tensor(payload.numel())
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, source, group=group)
    return json.loads(bytes(payload.tolist()))


def all_ranks(answer: bool) -> bool:
    """Whether every rank of the job answers yes. Collective."""
    votes = torch.tensor(int(answer))
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)
