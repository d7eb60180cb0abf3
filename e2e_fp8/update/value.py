"""Generalised advantage estimation (arXiv 1506.02438) and the clipped value loss of PPO. Pure: no value model is trained yet."""

from itertools import pairwise

import torch


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
    advantages, returns = torch.zeros_like(values_T), torch.zeros_like(values_T)
    for start, end in pairwise(cu_seqlens_S1.tolist()):
        next_value = next_advantage = torch.zeros_like(values_T[0])
        for t in range(end - 1, start - 1, -1):
            if loss_mask_T[t] > 0:
                delta = rewards_T[t] + gamma * next_value - values_T[t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = values_T[t]
                advantages[t], returns[t] = next_advantage, next_advantage + values_T[t]
    return advantages, returns


def whitened(values_T: torch.Tensor, loss_mask_T: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Trained values with mean 0 and (unbiased) standard deviation 1, ``[T]``; 0 outside the mask and for a single value."""
    trained = loss_mask_T > 0
    values = values_T[trained]
    result = torch.zeros_like(values_T)
    if values.numel() > 1:
        result[trained] = (values - values.mean()) / (values.std() + eps)
    return result


def clipped_value_loss(values_T: torch.Tensor, old_values_T: torch.Tensor, returns_T: torch.Tensor, *, clip: float) -> torch.Tensor:
    """``[T]``: max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2; no gradient where the clipped one is larger and clipped."""
    clipped = torch.maximum(torch.minimum(values_T, old_values_T + clip), old_values_T - clip)
    return torch.maximum((values_T - returns_T) ** 2, (clipped - returns_T) ** 2) / 2
