"""Megatron's 1F1B pipeline schedule over packed micro-batches of differing length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.types import PackedBatch

Forward = Callable[[Any, PackedBatch], torch.Tensor]
"""(wrapped model chunk, micro-batch) -> hidden states, or logits on the last stage."""
Records = list[dict[str, float]]


def _run(wrapped: Sequence[Any], batches: Sequence[PackedBatch], forward: Forward, finish: Callable[..., Any], **kwargs: Any) -> list[Any]:
    """``finish(micro-batch, output, ...)`` of each micro-batch, in order; empty except on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches_left: Any, model: Any, *unused: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches_left)
        return forward(model, batch), partial(finish, batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=list(wrapped),
        num_microbatches=len(batches),
        seq_length=1,  # unused: shapes travel with the activations
        micro_batch_size=1,
        **kwargs,
    )


def forward_backward(
    wrapped: Sequence[Any], batches: Sequence[PackedBatch], forward: Forward, loss: Callable[[torch.Tensor, PackedBatch], Any]
) -> Records:
    """Accumulate the gradients of all micro-batches; returns their metric sums on the last stage, nothing elsewhere.

    ``loss(logits, micro-batch)`` returns the scalar to differentiate and the metric sums.
    """

    def finish(batch: PackedBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        value, sums = loss(output, batch)
        return value, torch.tensor(0, dtype=torch.int), sums

    return _run(wrapped, batches, forward, finish, forward_only=False)


def per_token(
    wrapped: Sequence[Any],
    batches: Sequence[PackedBatch],
    forward: Forward,
    read: Callable[[torch.Tensor, PackedBatch], torch.Tensor],
    rows: int,
) -> list[torch.Tensor]:
    """``read(output, micro-batch)``, float32 ``[rows, T]``, of every micro-batch, without gradient, on all stages of the pipeline."""
    from megatron.core import parallel_state

    def finish(batch: PackedBatch, output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
        return read(output, batch)

    found = _run(wrapped, batches, forward, finish, forward_only=True, collect_non_loss_data=True)
    counts = [batch.token_ids.numel() for batch in batches]
    device = next(wrapped[0].parameters()).device
    joined = torch.cat(found, dim=1).contiguous() if found else torch.empty(rows, sum(counts), device=device)
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(joined, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return list(joined.split(counts, dim=1))
