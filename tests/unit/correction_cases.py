"""Corrections as the tests ask for them."""

import torch

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.correction.apply import correct
from e2e_fp8.correction.importance import ImportanceWeights, importance_weights, log_ratio
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.protocols import LossFn
from e2e_fp8.types import PackedBatch, TokenStats
from e2e_fp8.update.loss_fn import make_loss_fn


def token_truncated_weights(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, threshold: float) -> ImportanceWeights:
    """Token-level TIS of one sequence."""
    sequences = Sequences.of(mask, torch.tensor([0, mask.numel()]))
    return importance_weights(log_ratio(old, rollout, mask), sequences, level="token", mode="truncate", high=threshold)


def loss_of(objective: ObjectiveConfig, correction: CorrectionConfig) -> LossFn:
    """The loss of a micro-batch that the correction has gone over, with its old log-probs as the trainer's."""
    loss_fn = make_loss_fn(objective, correction)

    def corrected(stats: TokenStats, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        batches, _ = correct([batch], [batch.old_log_probs], correction)
        return loss_fn(stats, batches[0])

    return corrected
