"""The high-precision shadow pass of calibrated clipping (arXiv 2609.22870) in the loop.

Every ``objective.calibration.interval`` optimizer steps one mini-batch is run forward twice with BF16 linears on the trainer's own FP32
masters: with the weights before the first update of the RL step (old) and right before its own update (current). The ratios of the two
are those that BF16 training would clip; the ranges then move so that the FP8 ratios clip as many. What is interpretation here is in
docs/formulas.md.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from e2e_fp8.config.objective import ObjectiveConfig
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.protocols import TrainEngine
from e2e_fp8.types import PackedBatch
from e2e_fp8.update.calibrated_clipping import Ratios, calibrated_clip, clipped_ratios


@dataclass(frozen=True, kw_only=True)
class ClipState:
    """What lasts from one RL step to the next; in the checkpoint."""

    steps_since: int = 0
    """Optimizer steps since the last shadow pass, or since the start of RL."""
    factor: float = 1.0
    """Ranges in use over the configured ones."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"steps_since": self.steps_since, "factor": self.factor}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "ClipState":
        """Inverse of ``state_dict``."""
        return cls(steps_since=int(state["steps_since"]), factor=float(state["factor"]))


def in_use(configured: ObjectiveConfig, factor: float) -> ObjectiveConfig:
    """The objective with its ranges moved by ``factor``; the configured one itself at 1 and where calibration is off.

    A resumed run may have other limits than the one that found the factor: they hold at once.
    """
    factor = min(max(factor, configured.calibration.min_factor), configured.calibration.max_factor)
    if factor == 1.0 or not configured.calibration.interval:
        return configured
    moved = {"clip_low": configured.clip_low * factor}
    if configured.calibration.ranges == "both":
        moved["clip_high"] = configured.clip_high * factor
    return configured.model_copy(update=moved)


def due_minibatches(interval: int, steps_since: int, count: int) -> list[int]:
    """Which of the next ``count`` mini-batches, all of one RL step, get a shadow pass.

    The first is on policy, with ratio 1 at every token: where its turn has come, the second takes it.
    """
    due = []
    for index in range(count if interval else 0):
        steps_since += 1
        if steps_since >= interval and index > 0:
            due.append(index)
            steps_since = 0
    return due


class ShadowPass:
    """Calibration over the mini-batches of one RL step; made before the first update, as it needs the old weights.

    Args:
        state: Of the steps before; ``self.state`` is the one to keep, once the mini-batches are done.
    """

    def __init__(
        self, configured: ObjectiveConfig, trainer: TrainEngine, minibatches: list[list[PackedBatch]], state: ClipState, timer: PhaseTimer
    ) -> None:
        self.state = state
        self._configured, self._trainer, self._timer = configured, trainer, timer
        self._records: list[dict[str, float]] = []
        due = due_minibatches(configured.calibration.interval, state.steps_since, len(minibatches))
        self._old: dict[int, list[torch.Tensor]] = {}
        if due:
            with timer("shadow_pass"):
                self._old = {i: [s.log_probs for s in trainer.high_precision_token_stats(minibatches[i])] for i in due}

    def objective_for(self, index: int, part: list[PackedBatch]) -> ObjectiveConfig:
        """The objective of mini-batch ``index``, about to be updated on; a due one moves the ranges first."""
        due = index in self._old
        if due:
            with self._timer("shadow_pass"):
                self._calibrate(part, self._old.pop(index))
        self.state = replace(self.state, steps_since=0 if due else self.state.steps_since + 1)
        return in_use(self._configured, self.state.factor)

    def metrics(self) -> dict[str, float]:
        """Ranges in use and, after shadow passes, mean fractions clipped; nothing where calibration is off."""
        if not self._configured.calibration.interval:
            return {}
        objective = in_use(self._configured, self.state.factor)
        record = {"clip_low": objective.clip_low, "clip_high": objective.clip_high, "passes": float(len(self._records))}
        if self._records:
            record["refused"] = sum(r["refused"] for r in self._records)
        for name in ("high_precision", "fp8_configured", "fp8_calibrated"):
            values = [r[name] for r in self._records if name in r]
            if values:
                record[name] = sum(values) / len(values)
        return {f"clip_calibration/{name}": value for name, value in record.items()}

    def _calibrate(self, part: list[PackedBatch], old_high: list[torch.Tensor]) -> None:
        configured, cal = self._configured, self._configured.calibration
        high = [s.log_probs for s in self._trainer.high_precision_token_stats(part)]
        fp8 = [s.log_probs for s in self._trainer.token_stats(part)]
        level = configured.kind in ("gspo", "gspo_token")
        shadow = clipped_ratios(part, high, old_high, per_sequence=level)
        trained = clipped_ratios(part, fp8, [b.old_log_probs for b in part], per_sequence=level)
        if not (_finite(shadow) and _finite(trained)):
            self._records.append({"refused": 1.0})
            return
        ranges = {"clip_low": configured.clip_low, "clip_high": configured.clip_high}
        found = calibrated_clip(shadow.ratio, trained.ratio, trained.advantages, trained.mask, **ranges)
        factor = min(max(found.clip_low / configured.clip_low, cal.min_factor), cal.max_factor)
        negative = (trained.mask > 0) & (trained.advantages < 0)
        record = {"refused": 0.0}
        if bool(negative.any()):
            self.state = replace(self.state, factor=factor)
            bound = 1.0 - configured.clip_low * factor
            calibrated = float((trained.ratio[negative] < bound).double().mean())
            record |= {"high_precision": found.fraction, "fp8_configured": found.fraction_before, "fp8_calibrated": calibrated}
        self._records.append(record)


def _finite(ratios: Ratios) -> bool:
    return bool(torch.isfinite(ratios.ratio[ratios.mask > 0]).all())
