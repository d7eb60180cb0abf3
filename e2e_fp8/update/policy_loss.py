"""Token losses of the policy. Legend: T packed tokens.

GRPO with clip-higher (DAPO, arXiv 2503.14476): L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(lp - lp_old).
"""

import torch


def grpo_token_loss(
    log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss ``[T]`` and two 0/1 indicators ``[T]``: clipped below (A < 0), clipped above (A > 0).

    ``log_ratio`` carries the gradient; a clipped token has none.
    """
    if log_ratio_T.shape != advantages_T.shape:
        raise ValueError(f"log ratio {tuple(log_ratio_T.shape)} and advantages {tuple(advantages_T.shape)} differ")
    ratio = log_ratio_T.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages_T, clipped * advantages_T)
    low = ((ratio < 1.0 - clip_low) & (advantages_T < 0)).float()
    high = ((ratio > 1.0 + clip_high) & (advantages_T > 0)).float()
    return loss, low, high


def k3_kl(log_probs_T: torch.Tensor, ref_log_probs_T: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy, reference), ``[T]``: exp(d) - d - 1 with d = lp_ref - lp; its gradient is 1 - exp(d)."""
    d = (ref_log_probs_T - log_probs_T).clamp(-20.0, 20.0)
    return torch.expm1(d) - d
