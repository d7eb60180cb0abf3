"""Correction of the micro-batches of one or more optimizer steps: importance weights and keep masks onto each of them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from e2e_fp8.config.correction import CorrectionConfig
from e2e_fp8.correction.importance import ImportanceWeights, batch_normalization_factor, importance_weights, log_ratio
from e2e_fp8.correction.rejection import rejection_mask
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.types import PackedBatch


def joined_boundaries(batches: Sequence[PackedBatch]) -> torch.Tensor:
    """``cu_seqlens`` of the batches laid end to end, int64 ``[sum S + 1]``, on the CPU."""
    parts, total = [torch.zeros(1, dtype=torch.int64)], 0
    for batch in batches:
        parts.append(batch.cu_seqlens[1:].cpu().to(torch.int64) + total)
        total += batch.token_ids.numel()
    return torch.cat(parts)


def correct(
    batches: Sequence[PackedBatch], train_log_probs: Sequence[torch.Tensor], cfg: CorrectionConfig
) -> tuple[list[PackedBatch], dict[str, float]]:
    """Batches with ``importance_weights`` and ``keep_mask``, and metrics under ``rollout_corr/``.

    ``train_log_probs`` are the trainer's, one array ``[T]`` a batch: the old policy's, or in bypass mode the current one's. The mean of
    batch normalisation runs over all ``batches``, before rejection, as in verl.
    """
    if not cfg.corrects:
        return list(batches), {}
    mask = torch.cat([b.loss_mask.cpu() for b in batches])
    rollout = torch.cat([b.rollout_log_probs.cpu() for b in batches]).double()
    d = log_ratio(torch.cat([lp.detach().cpu() for lp in train_log_probs]).double(), rollout, mask)
    sequences = Sequences.of(mask, joined_boundaries(batches))
    metrics: dict[str, float] = {}
    weights = keep = None
    if cfg.rollout_is is not None:
        low, high = cfg.is_bounds
        result = importance_weights(d, sequences, level=cfg.rollout_is, mode=cfg.is_mode, low=low, high=high)
        weights, metrics = result.weights, _weight_metrics(result, sequences, cfg)
        if cfg.rollout_is_batch_normalize:
            factor = batch_normalization_factor(weights, sequences, level=cfg.rollout_is)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
            # all weights masked to 0: there is nothing to scale
            weights = torch.where(sequences.trained, weights / factor, weights) if factor else weights
    if cfg.rejections or cfg.rollout_token_veto_threshold is not None:
        rejection = rejection_mask(d, sequences, cfg.rejections, veto_threshold=cfg.rollout_token_veto_threshold)
        keep, metrics = rejection.keep, metrics | rejection.metrics
    return _spread(batches, weights, keep), metrics


def _spread(batches: Sequence[PackedBatch], weights: torch.Tensor | None, keep: torch.Tensor | None) -> list[PackedBatch]:
    sizes = [b.loss_mask.numel() for b in batches]

    def cut(values: torch.Tensor | None) -> list[torch.Tensor | None]:
        if values is None:
            return [None] * len(batches)
        return [part.to(b.loss_mask) for part, b in zip(values.split(sizes), batches, strict=True)]

    return [replace(b, importance_weights=w, keep_mask=k) for b, w, k in zip(batches, cut(weights), cut(keep), strict=True)]


def _weight_metrics(result: ImportanceWeights, sequences: Sequences, cfg: CorrectionConfig) -> dict[str, float]:
    """Of the ratios before the bounds; per-sequence ones of the mean over the sequence's tokens, as in verl."""
    if not bool(sequences.trained.any()):
        return {}
    low, high = cfg.is_bounds
    per_sequence = sequences.mean(result.ratio)[sequences.lengths > 0]
    prefix = "rollout_corr/rollout_is"
    return {
        f"{prefix}_oob_ratio": float(result.out_of_bounds[sequences.trained].mean()),
        f"{prefix}_seq_mean": float(per_sequence.mean()),
        f"{prefix}_seq_std": float(per_sequence.std()) if len(per_sequence) > 1 else 0.0,
        f"{prefix}_seq_min": float(per_sequence.min()),
        f"{prefix}_seq_max": float(per_sequence.max()),
        f"{prefix}_seq_max_deviation": float((per_sequence - 1).abs().max()),
        f"{prefix}_seq_fraction_high": float((per_sequence > high).double().mean()),
        f"{prefix}_seq_fraction_low": float((per_sequence < (low or 1.0 / high)).double().mean()),
    }
