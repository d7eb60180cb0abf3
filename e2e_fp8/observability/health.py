"""Monitors over the metrics of a run: what goes wrong in RL runs, when it did, and which configuration field to turn.

A monitor is a series derived from the records, a threshold and advice; everything here is a pure function of the records, so the
same alarms stand in the progress output, the summary and the report, and a resumed run raises those of an unbroken one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from e2e_fp8.config.health import HealthConfig
from e2e_fp8.observability.charts import short
from e2e_fp8.observability.names import OPERANDS

Records = Sequence[dict[str, float]]
Series = list[tuple[float, float]]
"""``(step, value)`` in step order."""


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """One thing to watch; ``name`` is its field in HealthConfig."""

    name: str
    label: str
    series: Callable[[Records, int], Series]
    """From RL records and ``health.window``."""
    advice: str
    fields: tuple[str, ...]
    """Configuration fields to turn."""
    needs: str
    """What has to be measured for the monitor to see anything."""
    below: bool = False
    """Alarm below the threshold, not above."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A monitor over a run."""

    monitor: Monitor
    threshold: float | None
    """None: switched off."""
    series: Series

    @property
    def alarms(self) -> Series:
        """Points past the threshold."""
        limit = self.threshold
        if limit is None:
            return []
        return [(step, value) for step, value in self.series if (value < limit if self.monitor.below else value > limit)]

    @property
    def firing(self) -> bool:
        """Whether the last point is past the threshold."""
        return bool(self.alarms) and self.alarms[-1] == self.series[-1]

    @property
    def state(self) -> str:
        """``off``, ``not measured``, ``ok``, ``alarm`` at the last point, or ``recovered`` from an earlier alarm."""
        if self.threshold is None:
            return "off"
        if not self.series:
            return "not measured"
        return "alarm" if self.firing else "recovered" if self.alarms else "ok"

    def sentence(self) -> str:
        """The alarm in one line, with the fields to turn."""
        assert self.threshold is not None
        step, value = self.alarms[-1]
        side = "below" if self.monitor.below else "above"
        return (
            f"{self.monitor.label} {short(value)}, {side} {short(self.threshold)} (health.{self.monitor.name}) at step {step:g}: "
            f"{self.monitor.advice} Fields: {', '.join(self.monitor.fields)}."
        )


def check_health(records: Records, cfg: HealthConfig) -> list[Verdict]:
    """Every monitor over the RL records (warm-start records are passed over), in the order of MONITORS."""
    rl = [r for r in records if r.get("phase", 1.0) == 1.0]
    return [Verdict(monitor=m, threshold=getattr(cfg, m.name), series=m.series(rl, cfg.window)) for m in MONITORS]


class HealthWatch:
    """Alarms of a running run; each is told once when it starts, and again after it stopped and came back.

    Args:
        cfg: Thresholds.
        records: What an interrupted session logged before.
    """

    def __init__(self, cfg: HealthConfig, records: Records = ()) -> None:
        self._cfg = cfg
        self._records = list(records)
        self._firing = self._firing_now()

    def observe(self, step: int, record: dict[str, float]) -> list[str]:
        """Add the record of ``step``; sentences of the alarms that it starts."""
        self._records.append(record | {"step": float(step)})
        before, self._firing = self._firing, self._firing_now()
        return [sentence for name, sentence in self._firing.items() if name not in before]

    def _firing_now(self) -> dict[str, str]:
        return {v.monitor.name: v.sentence() for v in check_health(self._records, self._cfg) if v.firing}


def points(records: Records, name: str) -> Series:
    """Finite values of a metric."""
    return [(r["step"], r[name]) for r in records if name in r and math.isfinite(r[name])]


def rolling_mean(series: Series, window: int) -> Series:
    """Mean of each full window of ``window`` successive points, at its last step."""
    chunks = (series[i - window : i] for i in range(window, len(series) + 1))
    return [(chunk[-1][0], math.fsum(v for _, v in chunk) / window) for chunk in chunks]


def kl_budget(records: Records) -> Series:
    """KL to the start in nats per response: KL per response token times mean response length."""
    length = dict(points(records, "response_length/mean"))
    return [(step, kl * length[step]) for step, kl in points(records, "kl_ref") if step in length]


def reward_divergence(records: Records, window: int) -> Series:
    """At each evaluation, the smaller of train reward's rise and held-out reward's fall since the best evaluation before.

    In standard deviations of the training rewards, so that neither a shift nor a positive factor of all rewards matters. Train
    reward is the mean of the last ``window`` steps. Evaluations before the first RL step have no train reward and do not count.
    """
    train = points(records, "reward/mean")
    spread = dict(points(records, "reward/std"))
    evaluations = points(records, "reward/held_out")

    def train_reward(step: float) -> float:
        recent = [v for s, v in train if s <= step][-window:]
        return math.fsum(recent) / len(recent) if recent else math.nan

    series = []
    best: tuple[float, float] | None = None
    for step, held_out in evaluations:
        if best is not None:
            deviations = [spread[s] for s, _ in train if best[0] <= s <= step and s in spread]
            unit = math.fsum(deviations) / len(deviations) if deviations else 0.0
            rise, fall = train_reward(step) - train_reward(best[0]), best[1] - held_out
            if unit > 0 and math.isfinite(rise):
                series.append((step, min(rise, fall) / unit))
        if best is None or held_out >= best[1]:
            best = (step, held_out)
    return series


def _entropy_share(records: Records, window: int) -> Series:
    means = rolling_mean(points(records, "entropy"), window)
    return [(step, value / means[0][1]) for step, value in means] if means and means[0][1] > 0 else []


def _degenerate_share(records: Records, window: int) -> Series:
    total = dict(points(records, "groups/total"))
    return rolling_mean([(s, v / total[s]) for s, v in points(records, "groups/degenerate") if total.get(s)], window)


def _ratio_tails(records: Records, window: int) -> Series:
    low = dict(points(records, "rollout_corr/rollout_is_ratio_fraction_low"))
    high = points(records, "rollout_corr/rollout_is_ratio_fraction_high")
    return rolling_mean([(s, v + low.get(s, 0.0)) for s, v in high], window)


def _explained(records: Records, window: int) -> Series:
    """A new critic knows nothing; the first two windows are its own."""
    return rolling_mean(points(records, "critic/vf_explained_var")[2 * window :], window)


def _cache_share(records: Records, window: int) -> Series:
    means = rolling_mean(points(records, "rollout/prefix_cache_hit_rate"), window)
    best = accumulate((value for _, value in means), max)
    return [(step, value / top) for (step, value), top in zip(means, best, strict=True) if top > 0]


def _worst(records: Records, names: Sequence[str]) -> Series:
    """Largest of the metrics that a step has."""
    measured = [(r["step"], [r[name] for name in names if name in r and math.isfinite(r[name])]) for r in records]
    return [(step, max(values)) for step, values in measured if values]


def memory_growth(records: Records, window: int) -> Series:
    """Growth of the process that grew most: the least of the last ``window`` steps over the least of the second window, minus 1.

    The least, as a checkpoint or an evaluation needs more for a moment; the second window, as caches fill in the first.
    """
    series: dict[float, float] = {}
    for name in ("memory/trainer_host_gib", "memory/engine_host_gib", "memory/trainer_device_gib"):
        values = points(records, name)
        lows = [(values[i - 1][0], min(v for _, v in values[i - window : i])) for i in range(2 * window, len(values) + 1)]
        for step, low in lows:
            if lows[0][1] > 0:
                series[step] = max(series.get(step, -1.0), low / lows[0][1] - 1.0)
    return sorted(series.items())


def _worst_saturation(records: Records, window: int) -> Series:
    measured = [(r["step"], [r[f"tiles/{o}/saturated"] for o in OPERANDS if f"tiles/{o}/saturated" in r]) for r in records]
    return [(step, max(values)) for step, values in measured if values and all(map(math.isfinite, values))]


MONITORS: tuple[Monitor, ...] = (
    Monitor(
        name="version_gap",
        label="Oldest sample's weights, optimizer steps behind",
        series=lambda records, window: points(records, "staleness/max"),
        advice="the engine samples from older weights than the trainer has; let the receipt name the tensors, rule out the transport.",
        fields=("sync.receipt", "sync.transport"),
        needs="staleness/max",
    ),
    Monitor(
        name="reward_hacking",
        label="Train reward up and held-out reward down, standard deviations",
        series=reward_divergence,
        advice="the policy learns what the training reward misses; read samples, tighten the reward, hold the policy closer to its start.",
        fields=("task.reward", "objective.kl_coef", "training.learning_rate"),
        needs="two evaluations after the start of RL (run.eval_interval)",
    ),
    Monitor(
        name="kl_budget",
        label="KL to the start, nats per response",
        series=lambda records, window: rolling_mean(kl_budget(records), window),
        advice="the policy has spent more KL than runs that generalize do; stop at an earlier checkpoint or hold it closer.",
        fields=("objective.kl_coef", "training.learning_rate", "run.steps"),
        needs="a reference policy (objective.kl_coef above 0)",
    ),
    Monitor(
        name="prefix_cache_drop",
        label="Prefix-cache hit rate over its best",
        series=_cache_share,
        advice="prompts of a group are computed again; give the KV cache more memory or run fewer sequences at once.",
        fields=("rollout.kv_cache_gib", "rollout.gpu_memory_utilization", "rollout.max_num_seqs"),
        needs="rollout/prefix_cache_hit_rate; of a server at rollout.server_url with --enable-prompt-tokens-details alone",
        below=True,
    ),
    Monitor(
        name="advantage_dilution",
        label="Mean |advantage| of long responses over short ones",
        series=lambda records, window: rolling_mean(points(records, "advantages/long_to_short"), window),
        advice="long responses carry little signal, often because they are cut off and all fail alike; allow more tokens or weigh less.",
        fields=("rollout.max_response_tokens", "objective.loss_agg_mode"),
        needs="responses of different lengths",
        below=True,
    ),
    Monitor(
        name="degenerate_groups",
        label="Groups with equal rewards",
        series=_degenerate_share,
        advice="the task is too easy or too hard for the policy; change its difficulty or draw more samples a prompt.",
        fields=("task.params", "rollout.group_size", "rollout.temperature"),
        needs="groups/degenerate, counted with objective.advantage group",
    ),
    Monitor(
        name="entropy_collapse",
        label="Entropy over its level at the start of RL",
        series=_entropy_share,
        advice="the policy has stopped exploring; raise the upper clip bound or the entropy bonus, or lower the learning rate.",
        fields=("objective.clip_high", "objective.entropy_coef", "training.learning_rate"),
        needs="entropy",
        below=True,
    ),
    Monitor(
        name="blind_critic",
        label="Share of the returns' variance that the critic explains",
        series=_explained,
        advice="a constant predicts the returns as well, the critic only adds noise; let it learn alone for longer, or at another rate.",
        fields=("objective.critic.critic_warmup", "objective.critic.learning_rate"),
        needs="critic/vf_explained_var of three times health.window steps (objective.advantage gae)",
        below=True,
    ),
    Monitor(
        name="ratio_tails",
        label="Tokens with p_train / p_rollout outside the bounds",
        series=_ratio_tails,
        advice="trainer and engine disagree on too many tokens; keep sensitive modules in BF16 or make both sides the same precision.",
        fields=("numerics.high_precision_modules", "numerics.rollout_precision", "correction.rollout_is_threshold"),
        needs="rollout_corr/rollout_is_ratio_fraction_high",
    ),
    Monitor(
        name="old_log_probs_audit",
        label="Audited sequences whose log-probs differ between trainer and engine",
        series=lambda records, window: points(records, "old_log_probs/audit_failures"),
        advice="the two sides no longer agree bit for bit, and the step was computed whole; find the module with e2e-fp8 align check.",
        fields=("training.old_log_probs", "numerics.alignment", "sync.receipt"),
        needs="old_log_probs/audit_failures, counted with training.old_log_probs rollout",
    ),
    Monitor(
        name="memory_imbalance",
        label="Memory of the most loaded rank over the mean of the ranks",
        series=lambda records, window: _worst(records, ("memory/trainer_imbalance", "memory/engine_imbalance")),
        advice="one rank holds more than the others and sets the limit of all; even out layers, experts and tokens of a micro-batch.",
        fields=("training.parallel.pipeline", "training.parallel.expert", "training.max_tokens_per_microbatch", "rollout.tensor_parallel"),
        needs="several ranks of the trainer or of the run's own server",
    ),
    Monitor(
        name="memory_growth",
        label="Growth of a process's memory since the start of RL",
        series=memory_growth,
        advice="memory that grows from step to step ends in the kernel killing the run; checkpoint often, then look for what is kept.",
        fields=("run.checkpoint_interval", "rollout.placement", "task.reward_workers"),
        needs="memory/* of twice health.window steps",
    ),
    Monitor(
        name="memory_full",
        label="Memory in use, fuller of host and device",
        series=lambda records, window: _worst(records, ("memory/host_used_fraction", "memory/device_used_fraction")),
        advice="the next longer batch may run out of memory; give the engine less, or cut micro-batches shorter.",
        fields=("rollout.gpu_memory_utilization", "rollout.kv_cache_gib", "rollout.sleep_level", "training.max_tokens_per_microbatch"),
        needs="memory/host_used_fraction",
    ),
    Monitor(
        name="tile_saturation",
        label="FP8 codes at the largest magnitude, worst operand",
        series=_worst_saturation,
        advice="values no longer fit the range of their tile; use FP32 scales or keep the modules in BF16.",
        fields=("numerics.scale_format", "numerics.high_precision_modules"),
        needs="tile statistics, measured at evaluations (run.eval_interval)",
    ),
)
