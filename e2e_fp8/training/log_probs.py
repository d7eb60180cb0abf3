"""Per-token log-probabilities and entropy from logits split over the vocabulary.

Shape legend: ``T`` tokens, ``V`` vocabulary columns of this rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.types import TokenStats


class SumOverRanks(torch.autograd.Function):
    """All-reduce sum of partial results; each rank's gradient is the upstream gradient, which all ranks share.

    Copies its input, so that a tensor saved for another backward is never changed in place.
    """

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def token_stats_from_logits(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: Any = None,
    engine_temperature: bool = False,
    engine_log_softmax: bool = False,
) -> TokenStats:
    """Log-probability of each target and entropy of each distribution, in nats, FP32 ``[T]``.

    Args:
        logits_TV: float32; rank r of ``group`` holds columns ``r * V`` to ``(r + 1) * V`` of the (padded) vocabulary.
        targets_T: int64 global token ids, each below ``vocab_size``.
        temperature: divides the logits first.
        vocab_size: true vocabulary size; columns at or above it are padding and get probability 0.
        group: tensor-parallel process group, or None for a single rank.
        engine_temperature: divide by an FP32 tensor, as vLLM's sampler does; CUDA multiplies by the inverse of a number instead.
        engine_log_softmax: take the log-probability from ``torch.log_softmax``, as vLLM's sampler does; single rank only.

    Raises:
        ValueError: the logits are not FP32.

    With m = max z: log p(t) = z_t - m - log S, S = sum exp(z - m), entropy = m + log S - sum exp(z - m) z / S.
    """
    if logits_TV.dtype != torch.float32:
        raise ValueError(f"Log-probabilities are computed from FP32 logits, not {logits_TV.dtype}.")
    ranks = 1 if group is None else dist.get_world_size(group)
    first = 0 if group is None else dist.get_rank(group) * logits_TV.size(1)
    z_TV = logits_TV
    if temperature != 1.0:
        z_TV = logits_TV / (logits_TV.new_tensor([temperature]) if engine_temperature else temperature)
    padding = max(0, min(logits_TV.size(1), first + logits_TV.size(1) - vocab_size))
    if padding:
        z_TV = torch.cat([z_TV[:, : z_TV.size(1) - padding], z_TV.new_full((z_TV.size(0), padding), -torch.inf)], dim=1)
    max_T = z_TV.detach().amax(dim=1)
    if ranks > 1:
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
    shifted_TV = z_TV - max_T[:, None]
    exp_TV = shifted_TV.exp()
    # Padding would give 0 * -inf = NaN in the entropy sum.
    weighted_TV = exp_TV * (shifted_TV.masked_fill(exp_TV == 0, 0.0))
    local_T = targets_T - first
    mine = (local_T >= 0) & (local_T < logits_TV.size(1))
    picked_T = torch.where(mine, shifted_TV.gather(1, local_T.clamp(0, logits_TV.size(1) - 1)[:, None])[:, 0], 0.0)
    sums_3T = torch.stack([exp_TV.sum(dim=1), weighted_TV.sum(dim=1), picked_T])
    if ranks > 1:
        sums_3T = SumOverRanks.apply(sums_3T, group)
    sum_exp_T, sum_weighted_T, target_T = sums_3T.unbind(0)
    log_sum_T = sum_exp_T.log()
    log_probs_T = target_T - log_sum_T
    if engine_log_softmax and ranks == 1:
        log_probs_T = z_TV[:, :vocab_size].log_softmax(dim=-1).gather(1, targets_T[:, None])[:, 0]
    return TokenStats(log_probs=log_probs_T, entropy=log_sum_T - sum_weighted_T / sum_exp_T)
