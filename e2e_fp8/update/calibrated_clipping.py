"""Calibrated clipping (arXiv 2609.22870): clip bounds for FP8 ratios that hold back as many tokens as high precision would.

FP8 noise spreads the ratios, so that a range chosen in BF16 clips other tokens, and more of them, in FP8. From one batch with the ratios
of both precisions: the share of tokens with a negative advantage that the BF16 ratio puts below 1 - clip_low is kept, and the lower
bound moves to the FP8 quantile that clips that share. The paper's code is not public; what is interpretation here is in
docs/formulas.md. The pass that gives the ratios is ``orchestration.shadow_pass``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.correction.importance import safe_log_ratio
from e2e_fp8.correction.sequences import Sequences
from e2e_fp8.types import PackedBatch

SMALLEST_CLIP = 1e-6
"""Lower end of a calibrated range: the bound stays below ratio 1 even if most tokens lie above it."""


@dataclass(frozen=True, kw_only=True)
class CalibratedClip:
    """New ranges, as ``objective.clip_low`` and ``clip_high`` are meant, and what they were made from."""

    clip_low: float
    clip_high: float
    fraction: float
    """Share of tokens with a negative advantage that the high-precision ratio clips below; nan without such tokens."""
    fraction_before: float
    """The same of the FP8 ratio under the old bound."""


def calibrated_clip(
    shadow_ratio_T: torch.Tensor,
    fp8_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> CalibratedClip:
    """Ranges for the FP8 ratios of the same trained tokens, or of the same sequences for GSPO.

    ``clip_low`` and ``clip_high`` are those of high precision. Without a trained token of negative advantage they come back unchanged.

    Raises:
        ValueError: shapes differ, a trained ratio is not finite, or a range is not positive.
    """
    if not shadow_ratio_T.shape == fp8_ratio_T.shape == advantages_T.shape == loss_mask_T.shape:
        raise ValueError("ratios, advantages and loss mask must have equal shapes")
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(f"ranges must be positive and clip_low at most 1, got {clip_low} and {clip_high}")
    chosen = (loss_mask_T > 0) & (advantages_T < 0)
    shadow, fp8 = shadow_ratio_T[chosen].double(), fp8_ratio_T[chosen].double()
    if not bool(torch.isfinite(shadow).all() and torch.isfinite(fp8).all()):
        raise ValueError("a ratio of a trained token is not finite")
    if not shadow.numel():
        return CalibratedClip(clip_low=clip_low, clip_high=clip_high, fraction=float("nan"), fraction_before=float("nan"))
    bound = 1.0 - clip_low
    clipped = int((shadow < bound).sum())
    moved = _bound_with(fp8.sort().values, clipped, bound)
    low = clip_low if moved == bound else max(1.0 - moved, SMALLEST_CLIP)
    return CalibratedClip(
        clip_low=low,
        clip_high=clip_high * low / clip_low,
        fraction=clipped / shadow.numel(),
        fraction_before=float((fp8 < bound).double().mean()),
    )


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Ratios that an objective clips, of one mini-batch; float32 ``[N]`` each, N tokens or sequences."""

    ratio: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


def clipped_ratios(
    batches: Sequence[PackedBatch], log_probs: Sequence[torch.Tensor], old_log_probs: Sequence[torch.Tensor], *, per_sequence: bool
) -> Ratios:
    """The loss's own ratios of the micro-batches, from log-probs ``[T]`` of each: per token, or per sequence (GSPO), where a sequence
    counts once.
    """
    parts = []
    for batch, current, old in zip(batches, log_probs, old_log_probs, strict=True):
        mask = batch.trained_mask
        log_ratio, advantages = safe_log_ratio(current, old, mask), batch.advantages
        if per_sequence:
            sequences = Sequences.of(mask, batch.cu_seqlens)
            log_ratio, advantages, mask = sequences.mean(log_ratio), sequences.mean(advantages), (sequences.lengths > 0).to(mask)
        parts.append((log_ratio.exp(), advantages, mask))
    ratio, advantages, mask = (torch.cat(column).detach().cpu() for column in zip(*parts, strict=True))
    return Ratios(ratio=ratio, advantages=advantages, mask=mask)


def _bound_with(ordered: torch.Tensor, count: int, bound: float) -> float:
    """A bound with ``count`` of the ascending values below it: ``bound`` itself if it is one, else the middle of the two values.

    Where nothing is to be clipped it is the smallest value, if that is below ``bound``; where everything is, the middle to ratio 1.
    """
    if count == 0:
        return min(bound, float(ordered[0]))
    below = float(ordered[count - 1])
    above = float(ordered[count]) if count < len(ordered) else max(below, 1.0)
    return bound if below < bound <= above else (below + above) / 2
