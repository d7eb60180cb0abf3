"""Group-relative advantages (GRPO, arXiv 2402.03300): A_i = (R_i - mean_g R) / (std_g R + eps), std unbiased as in verl.

Without the division it is Dr. GRPO's (arXiv 2503.20783) advantage. A group of one sample has no baseline and counts as degenerate;
verl takes its reward as its advantage instead.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Groups of one step."""

    total: int
    degenerate: int
    """Groups whose rewards are all equal: no gradient comes from them."""


def group_advantages(
    rewards_N: torch.Tensor, group_ids_N: torch.Tensor, *, normalize_by_std: bool, eps: float
) -> tuple[torch.Tensor, GroupStats]:
    """float32 ``[N]`` advantages and group counts; exactly 0 in a degenerate group.

    Raises:
        ValueError: shapes differ or a reward is not finite.
    """
    if rewards_N.shape != group_ids_N.shape or rewards_N.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards_N.shape)} and group ids {tuple(group_ids_N.shape)} must be equal one-dimensional shapes")
    if not bool(torch.isfinite(rewards_N).all()):
        raise ValueError("a reward is not finite")
    advantages = torch.zeros(rewards_N.shape, dtype=torch.float32)
    degenerate = 0
    groups = torch.unique(group_ids_N)
    for group in groups:
        members = group_ids_N == group
        rewards = rewards_N[members].double()
        if bool((rewards == rewards[0]).all()):
            degenerate += 1
            continue
        centered = rewards - rewards.mean()
        advantages[members] = (centered / (rewards.std() + eps) if normalize_by_std else centered).float()
    return advantages, GroupStats(total=len(groups), degenerate=degenerate)
