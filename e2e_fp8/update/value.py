"""Generalised advantage estimation (arXiv 1506.02438), and the clipped value loss of PPO and its metrics."""

import torch

from e2e_fp8.config.critic import CriticConfig
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.protocols import ValueLossFn
from e2e_fp8.types import PackedBatch
from e2e_fp8.update.aggregation import token_sum


def generalized_advantages(
    rewards_T: torch.Tensor, values_T: torch.Tensor, loss_mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns ``[T]``, 0 outside the mask; A_t = sum_k (gamma lam)^k delta_{t+k}, delta = r + gamma V' - V.

    Steps are the trained tokens of each sequence in order; those between them, such as a tool's output, are passed over. The value
    after the last one is 0.

    Raises:
        ValueError: shapes differ.
    """
    if not rewards_T.shape == values_T.shape == loss_mask_T.shape:
        raise ValueError(f"shapes differ: {tuple(rewards_T.shape)}, {tuple(values_T.shape)}, {tuple(loss_mask_T.shape)}")
    sequences = Sequences.of(loss_mask_T, cu_seqlens_S1)
    where = _steps(sequences)
    rewards_SR, values_SR = (torch.zeros(where.shape, dtype=values_T.dtype, device=values_T.device) for _ in range(2))
    real = where >= 0
    rewards_SR[real], values_SR[real] = rewards_T[where[real]], values_T[where[real]]
    advantages_SR = torch.zeros_like(values_SR)
    next_value = next_advantage = values_T.new_zeros(len(sequences.lengths))
    for r in range(where.size(1) - 1, -1, -1):
        delta = rewards_SR[:, r] + gamma * next_value - values_SR[:, r]
        # a shorter sequence has not begun yet, seen from the end: what follows its last step stays 0
        next_advantage = torch.where(real[:, r], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(real[:, r], values_SR[:, r], next_value)
        advantages_SR[:, r] = next_advantage
    advantages, returns = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages[where[real]] = advantages_SR[real]
    returns[where[real]] = (advantages_SR + values_SR)[real]
    return advantages, returns


def _steps(sequences: Sequences) -> torch.Tensor:
    """int64 ``[S, R]``, R at least 1: packed position of the r-th trained token of each sequence, -1 beyond its last."""
    positions = sequences.trained.nonzero().flatten()
    owners, lengths = sequences.ids[positions], sequences.lengths.to(torch.int64)
    first = lengths.cumsum(0) - lengths
    where = positions.new_full((len(lengths), max(1, int(lengths.max()))), -1)
    where[owners, torch.arange(len(positions), device=positions.device) - first[owners]] = positions
    return where


def token_rewards(rewards_S: torch.Tensor, loss_mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """``[T]``: each sequence's reward at its last trained token, 0 elsewhere; a sequence without trained tokens earns nothing.

    Raises:
        ValueError: not one reward for each sequence.
    """
    sequences = Sequences.of(loss_mask_T, cu_seqlens_S1)
    if rewards_S.shape != sequences.lengths.shape:
        raise ValueError(f"{tuple(rewards_S.shape)} rewards for {len(sequences.lengths)} sequences")
    result = torch.zeros(loss_mask_T.shape, dtype=rewards_S.dtype, device=loss_mask_T.device)
    earning = sequences.lengths > 0
    result[_steps(sequences)[earning].amax(dim=1)] = rewards_S.to(result.device)[earning]
    return result


def whitened(values_T: torch.Tensor, loss_mask_T: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Trained values with mean 0 and (unbiased) standard deviation 1, ``[T]``; 0 outside the mask and for a single value."""
    trained = loss_mask_T > 0
    values = values_T[trained]
    result = torch.zeros_like(values_T)
    if values.numel() > 1:
        result[trained] = (values - values.mean()) / (values.std() + eps)
    return result


def clipped_values(values_T: torch.Tensor, old_values_T: torch.Tensor, *, clip: float) -> torch.Tensor:
    """``[T]``: clip(V, V_old - clip, V_old + clip); no gradient where that changes V."""
    return torch.clamp(values_T, old_values_T - clip, old_values_T + clip)


def clipped_value_loss(values_T: torch.Tensor, old_values_T: torch.Tensor, returns_T: torch.Tensor, *, clip: float) -> torch.Tensor:
    """``[T]``: max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2; no gradient where the clipped one is larger and clipped."""
    error, clipped = (values_T - returns_T) ** 2, (clipped_values(values_T, old_values_T, clip=clip) - returns_T) ** 2
    # a maximum would split the gradient where the two are equal
    return torch.where(clipped > error, clipped, error) / 2


def make_value_loss_fn(critic: CriticConfig) -> ValueLossFn:
    """Sum over the loss mask of PPO's value loss (arXiv 1707.06347; value clipping as in its authors' code, "PPO2").

    Metric sums, verl's: ``critic/vf_loss``, ``critic/vpred_mean`` and with clipping ``critic/vf_clipfrac``, tokens where the clipped
    error is the larger one.

    Raises, when called:
        ValueError: the batch has no values or returns.
    """

    def loss_fn(values_T: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic's batch has no values or no returns")
        mask = batch.loss_mask
        # masked positions may hold anything, and nothing of it may meet a gradient
        values = torch.where(mask > 0, values_T, torch.zeros_like(values_T))
        metrics = {"critic/vpred_mean": token_sum(values.detach(), mask)}
        if critic.value_clip is None:
            loss = (values - batch.returns) ** 2 / 2
        else:
            loss = clipped_value_loss(values, batch.values, batch.returns, clip=critic.value_clip)
            clipped = clipped_values(values.detach(), batch.values, clip=critic.value_clip)
            larger = (clipped - batch.returns) ** 2 > (values.detach() - batch.returns) ** 2
            metrics["critic/vf_clipfrac"] = token_sum(larger.to(mask.dtype), mask)
        total = token_sum(loss, mask)
        metrics["critic/vf_loss"] = total.detach()
        return total, metrics

    return loss_fn


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float:
    """1 - var(R - V) / (var(R) + 1e-5) over trained tokens, as verl's ``critic/vf_explained_var``; 0 for fewer than two."""
    if returns.numel() < 2:
        return 0.0
    returns, values = returns.double(), values.double()
    return float(1 - (returns - values).var() / (returns.var() + 1e-5))
