"""Rewards as the objective shapes them: soft punishment of long responses, and the KL to the reference taken off."""

from collections.abc import Sequence

import torch

from e2e_fp8.config.root import Config
from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.types import PackedBatch, Sample
from e2e_fp8.update.kl import kl_estimate
from e2e_fp8.update.rewards import soft_overlong_penalty


def punished_rewards(cfg: Config, samples: Sequence[Sample]) -> tuple[torch.Tensor, dict[str, float]]:
    """Float32 ``[N]`` rewards less the soft overlong punishment, and its mean if there is one."""
    objective = cfg.objective
    rewards = torch.tensor([s.reward for s in samples])
    if not objective.overlong_buffer_tokens:
        return rewards, {}
    lengths = torch.tensor([len(s.response_token_ids) for s in samples])
    limit, buffer = cfg.rollout.max_response_tokens, objective.overlong_buffer_tokens
    penalty = soft_overlong_penalty(lengths, max_tokens=limit, buffer_tokens=buffer, penalty=objective.overlong_penalty)
    return rewards + penalty, {"reward/overlong_penalty": float(penalty.mean())}


def kl_is_in_reward(cfg: Config) -> bool:
    """Whether the KL to the reference is taken off the rewards."""
    return cfg.objective.kl_coef > 0 and cfg.objective.kl_placement == "reward"


def token_kl(batch: PackedBatch, estimator: str) -> torch.Tensor:
    """``[T]`` estimate of KL(old, reference), 0 outside the loss mask.

    Raises:
        ValueError: the batch has no ``ref_log_probs``.
    """
    if batch.ref_log_probs is None:
        raise ValueError("objective.kl_placement is reward but the batch has no ref_log_probs")
    estimate = kl_estimate(safe_log_ratio(batch.ref_log_probs, batch.old_log_probs, batch.loss_mask), estimator)
    return torch.where(batch.loss_mask > 0, estimate, torch.zeros_like(estimate))


def mean_kl(kl: Sequence[torch.Tensor], batches: Sequence[PackedBatch]) -> dict[str, float]:
    """``kl_ref``: mean over response tokens of what ``token_kl`` gave for each batch."""
    return {"kl_ref": float(sum(k.sum() for k in kl)) / max(sum(float(b.loss_mask.sum()) for b in batches), 1.0)}
