"""The final figures of a run, the same ones in the terminal summary and in the report."""

import math
from dataclasses import dataclass

from e2e_fp8.observability.charts import short
from e2e_fp8.observability.history import RunHistory, mean
from e2e_fp8.observability.names import OPERANDS, PASS_AT_K, PHASES, TILE_STATISTICS

ENDS = 5
"""Steps at either end over which training reward is averaged."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the summary."""

    label: str
    value: str
    note: str = ""
    good: bool | None = None
    """False marks a failure, True a passed check."""


def final_figures(history: RunHistory) -> list[Figure]:
    """Everything one wants to know of a finished run, in order; a figure with no data says so."""
    return [
        _held_out(history),
        *_pass_at_k(history),
        _train_reward(history),
        _ends(history, "response_length/mean", "Response length", "tokens"),
        _mismatch(history),
        _health(history),
        _receipts(history),
        *_speed(history),
        _skipped(history),
        *_calibration(history),
        *_tiles(history),
    ]


def duration(seconds: float) -> str:
    """``1 h 02 min``, ``3 min 05 s``, ``4.2 s``."""
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _held_out(history: RunHistory) -> Figure:
    steps, values = history.series("reward/held_out")
    if not values:
        return Figure(label="Held-out reward", value="not evaluated")
    if len(values) == 1:
        return Figure(label="Held-out reward", value=f"{values[0]:.3f}", note=f"one evaluation, step {steps[0]:g}")
    note = f"steps {steps[0]:g} to {steps[-1]:g}, best {max(values):.3f}"
    return Figure(label="Held-out reward", value=f"{values[0]:.3f} → {values[-1]:.3f}", note=note)


def _pass_at_k(history: RunHistory) -> list[Figure]:
    """pass@1 and the largest k that was sampled, first and last evaluation."""
    measured = [k for k in PASS_AT_K if history.values(f"pass_at_k/{k}")]
    values = {k: history.values(f"pass_at_k/{k}") for k in sorted({*measured[:1], *measured[-1:]})}
    return [
        Figure(label=f"Held-out pass@{k}", value=f"{v[0]:.3f} → {v[-1]:.3f}", note="unbiased estimate, first and last evaluation")
        for k, v in values.items()
    ]


def _health(history: RunHistory) -> Figure:
    """How many monitors stand at alarm; each has its own line in the summary and the report."""
    verdicts = history.health()
    firing = [v for v in verdicts if v.firing]
    unseen = sum(v.state == "not measured" for v in verdicts)
    value = f"{len(firing)} alarm{'' if len(firing) == 1 else 's'}" if firing else "no alarm at the end"
    recovered = [v.monitor.name for v in verdicts if v.state == "recovered"]
    notes = [f"at the end: {', '.join(v.monitor.name for v in firing)}"] if firing else []
    notes += [f"earlier: {', '.join(recovered)}"] if recovered else []
    return Figure(
        label="Health", value=value, note="; ".join([*notes, f"{unseen} of {len(verdicts)} not measured"]), good=False if firing else None
    )


@dataclass(frozen=True, kw_only=True)
class PhaseBound:
    """What a faster phase could do for the whole RL step, by Amdahl's law. A step is the sum of its phases."""

    phase: str
    seconds: float
    """Mean of an RL step, steps without the phase counted as 0."""
    share: float
    half: float
    """How many times as fast a step would be if the phase took half its time."""
    bound: float
    """The same if it took none; infinite when the phase is the whole step."""


def amdahl_bounds(history: RunHistory) -> list[PhaseBound]:
    """Bounds of every phase that took time, in the order of the step."""
    records = [r for r in history.records if r.get("phase", 1.0) == 1.0]
    totals = {p: math.fsum(r[f"time/{p}"] for r in records if f"time/{p}" in r) for p in PHASES}
    step = math.fsum(totals.values())
    return [
        PhaseBound(
            phase=phase,
            seconds=seconds / len(records),
            share=seconds / step,
            half=step / (step - seconds / 2),
            bound=step / (step - seconds) if step - seconds > 0 else math.inf,
        )
        for phase, seconds in totals.items()
        if seconds > 0
    ]


def _train_reward(history: RunHistory) -> Figure:
    values = history.values("reward/mean")
    if not values:
        return Figure(label="Train reward", value="no RL step")
    first, last = mean(values[:ENDS]), mean(values[-ENDS:])
    return Figure(
        label="Train reward", value=f"{first:.3f} → {last:.3f}", note=f"mean of the first and last {min(ENDS, len(values))} steps"
    )


def _ends(history: RunHistory, name: str, label: str, unit: str) -> Figure:
    values = history.values(name)
    if not values:
        return Figure(label=label, value="n/a")
    return Figure(label=label, value=f"{short(mean(values[:ENDS]))} → {short(mean(values[-ENDS:]))}", note=f"{unit}, same steps")


def _mismatch(history: RunHistory) -> Figure:
    steps, values = history.series("mismatch_kl")
    if not values:
        return Figure(label="Mismatch KL", value="n/a")
    note = f"max {short(max(values))} at step {steps[values.index(max(values))]:g}, nats per token"
    return Figure(label="Mismatch KL, mean", value=short(mean(values)), note=note)


def _receipts(history: RunHistory) -> Figure:
    passed, failed, unchecked = history.receipt_counts()
    if not history.receipts:
        return Figure(label="Receipts", value="none")
    note = f"{unchecked} syncs not checked" if unchecked else "trainer and engine bytes equal" if not failed else "see the receipts table"
    return Figure(label="Receipts", value=f"{passed} passed, {failed} failed", note=note, good=None if not passed + failed else failed == 0)


def _speed(history: RunHistory) -> list[Figure]:
    figures = []
    for label, tokens, phase in (("Rollout speed", "tokens/rollout", "rollout"), ("Update speed", "tokens/train", "update")):
        rl = [r for r in history.records if tokens in r and f"time/{phase}" in r and r.get("phase", 1.0) == 1.0]
        seconds = math.fsum(r[f"time/{phase}"] for r in rl)
        if seconds > 0:
            figures.append(
                Figure(label=label, value=f"{short(math.fsum(r[tokens] for r in rl) / seconds)} tokens/s", note="over all RL steps")
            )
    times = history.values("time")
    phases = history.phase_seconds()
    split = ", ".join(f"{phase} {100 * value / sum(phases.values()):.0f} %" for phase, value in phases.items())
    figures.append(Figure(label="Wall time", value=duration(times[-1] if times else math.nan), note=split))
    return figures


def _skipped(history: RunHistory) -> Figure:
    skipped = int(sum(history.values("skipped_steps")))
    return Figure(
        label="Skipped optimizer steps",
        value=str(skipped),
        note="non-finite gradients, or nothing left to train on" if skipped else "",
        good=None if not skipped else False,
    )


def _calibration(history: RunHistory) -> list[Figure]:
    """Calibrated clipping: how often, what it cost, and where the range ended; nothing for a run without it."""
    passes = math.fsum(history.values("clip_calibration/passes"))
    bounds = history.values("clip_calibration/clip_low")
    interval = ((history.config.get("objective") or {}).get("calibration") or {}).get("interval")
    if not bounds:
        return []
    note = f"clip_low {short(bounds[0])} → {short(bounds[-1])}"
    if passes:
        cost = next((b for b in amdahl_bounds(history) if b.phase == "shadow_pass"), None)
        seconds = math.fsum(history.values("time/shadow_pass"))
        note = f"{short(seconds / passes)} s a pass, {100 * (cost.share if cost else 0.0):.1f} % of the RL steps' time; {note}"
    every = f"one in {interval} optimizer steps, " if interval else ""
    return [Figure(label="Calibrated clipping, shadow passes", value=f"{every}{passes:g} in all", note=note)]


def _tiles(history: RunHistory) -> list[Figure]:
    figures = []
    for operand in OPERANDS:
        last = {s: history.values(f"tiles/{operand}/{s}") for s in TILE_STATISTICS}
        text = ", ".join(f"{s.replace('_', ' ').replace('e4m3', 'E4M3')} {short(100 * v[-1])} %" for s, v in last.items() if v)
        if text:
            figures.append(Figure(label=f"FP8 tiles, {operand}", value=text, note="last measured step"))
    return figures
