"""Token losses of the policy. Legend: T packed tokens.

GRPO with clip-higher (DAPO, arXiv 2503.14476): L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(lp - lp_old).
Both functions take a log ratio that is finite everywhere (``correction.importance.safe_log_ratio``): a masked position that is
infinite or nan would reach the gradient of the others' sum as 0 * nan.
"""

import torch


def grpo_token_loss(
    log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss ``[T]`` and two 0/1 indicators ``[T]``: clipped below (A < 0), clipped above (A > 0).

    ``log_ratio`` is lp - lp_old and carries the gradient: dL/d(lp) = -r A, and 0 for a clipped token. There is no dual clip: for
    A < 0 the loss grows with r.

    Raises:
        ValueError: shapes differ.
    """
    if log_ratio_T.shape != advantages_T.shape:
        raise ValueError(f"log ratio {tuple(log_ratio_T.shape)} and advantages {tuple(advantages_T.shape)} differ")
    ratio = log_ratio_T.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages_T, clipped * advantages_T)
    low = ((ratio < 1.0 - clip_low) & (advantages_T < 0)).float()
    high = ((ratio > 1.0 + clip_high) & (advantages_T > 0)).float()
    return loss, low, high


def k3_kl(ref_log_ratio_T: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy, reference), ``[T]``: exp(d) - d - 1 with d = lp_ref - lp.

    Its gradient with respect to lp is 1 - exp(d). verl's ``low_var_kl`` in addition clamps the estimate to +-10; this one does not.
    """
    return torch.expm1(ref_log_ratio_T) - ref_log_ratio_T
