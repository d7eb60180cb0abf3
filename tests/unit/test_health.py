"""Health monitors: each fires where it must and stays silent where it must not, whatever the unit of the rewards."""

import io
import json
import math
import random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import write_run

from e2e_fp8.config.health import HealthConfig
from e2e_fp8.config.load import config_fields
from e2e_fp8.config.root import Config
from e2e_fp8.observability.figures import amdahl_bounds, final_figures
from e2e_fp8.observability.health import MONITORS, HealthWatch, check_health, kl_budget, reward_divergence
from e2e_fp8.observability.history import load_history
from e2e_fp8.observability.names import METRICS
from e2e_fp8.observability.progress import print_summary
from e2e_fp8.observability.report import write_report

STEPS = 30


def _history(seed: int = 0, **series) -> list[dict[str, float]]:
    """``STEPS`` RL records; each series is a function of the 0-based step, None where it is not logged."""
    rng = random.Random(seed)
    records = []
    for i in range(STEPS):
        record = {"step": 20.0 + i, "phase": 1.0}
        for name, value in series.items():
            number = value(i)
            if number is not None:
                record[name] = number * (1 + 0.02 * (rng.random() - 0.5))
        records.append(record)
    return records


def _rewards(train, held_out):
    return {
        "reward/mean": train,
        "reward/std": lambda i: 0.4,
        "reward/held_out": lambda i: held_out(i) if i % 5 == 4 else None,
    }


CASES = {
    "version_gap": ({"staleness/max": lambda i: 2.0 if i > 20 else 0.0}, {"staleness/max": lambda i: 0.0}),
    "reward_hacking": (
        _rewards(lambda i: 0.3 + 0.02 * i, lambda i: 0.5 - 0.02 * abs(i - 9)),
        _rewards(lambda i: 0.3 + 0.02 * i, lambda i: 0.3 + 0.01 * i),
    ),
    "kl_budget": (
        {"kl_ref": lambda i: 0.001 * i, "response_length/mean": lambda i: 900.0},
        {"kl_ref": lambda i: 0.001 * i, "response_length/mean": lambda i: 400.0},
    ),
    "prefix_cache_drop": (
        {"rollout/prefix_cache_hit_rate": lambda i: 0.8 if i < 15 else 0.1},
        {"rollout/prefix_cache_hit_rate": lambda i: 0.8 - 0.01 * i},
    ),
    "advantage_dilution": (
        {"advantages/long_to_short": lambda i: 1.0 if i < 10 else 0.2},
        {"advantages/long_to_short": lambda i: 0.8},
    ),
    "degenerate_groups": (
        {"groups/degenerate": lambda i: 60.0, "groups/total": lambda i: 64.0},
        {"groups/degenerate": lambda i: 20.0, "groups/total": lambda i: 64.0},
    ),
    "entropy_collapse": ({"entropy": lambda i: 1.5 * 0.85**i}, {"entropy": lambda i: 1.5 - 0.02 * i}),
    "blind_critic": (
        {"critic/vf_explained_var": lambda i: -0.1},
        {"critic/vf_explained_var": lambda i: -0.5 if i < 10 else 0.1},
    ),
    "ratio_tails": (
        {"rollout_corr/rollout_is_ratio_fraction_high": lambda i: 0.006, "rollout_corr/rollout_is_ratio_fraction_low": lambda i: 0.007},
        {"rollout_corr/rollout_is_ratio_fraction_high": lambda i: 0.002, "rollout_corr/rollout_is_ratio_fraction_low": lambda i: 0.003},
    ),
    "old_log_probs_audit": (
        {"old_log_probs/audit_failures": lambda i: 1.0 if i > 20 else 0.0},
        {"old_log_probs/audit_failures": lambda i: 0.0},
    ),
    "memory_imbalance": (
        {"memory/trainer_imbalance": lambda i: 1.05, "memory/engine_imbalance": lambda i: 1.4},
        {"memory/trainer_imbalance": lambda i: 1.1},
    ),
    "memory_growth": (
        {"memory/trainer_host_gib": lambda i: 3.0, "memory/engine_host_gib": lambda i: 2.0 + 0.05 * i},
        # caches fill at the start, and a checkpoint needs twice the memory for a moment
        {"memory/trainer_host_gib": lambda i: min(3.0, 1.0 + 0.4 * i) * (2.0 if i % 5 == 4 else 1.0)},
    ),
    "memory_full": (
        {"memory/host_used_fraction": lambda i: 0.5, "memory/device_used_fraction": lambda i: 0.9 if i < 25 else 0.98},
        {"memory/host_used_fraction": lambda i: 0.9, "memory/device_used_fraction": lambda i: 0.9},
    ),
    "tile_saturation": (
        {"tiles/weights/saturated": lambda i: 0.0001, "tiles/activations/saturated": lambda i: 0.3 if i > 25 else 0.01},
        {f"tiles/{o}/saturated": lambda i: 0.012 for o in ("weights", "activations", "gradients")},
    ),
}


def _verdict(records, name, **cfg):
    return next(v for v in check_health(records, HealthConfig(**cfg)) if v.monitor.name == name)


def test_every_monitor_has_a_threshold_a_case_and_existing_fields() -> None:
    names = [m.name for m in MONITORS]
    assert set(names) == set(HealthConfig.model_fields) - {"window"} == CASES.keys()
    assert len(set(names)) == len(names)
    fields = set(config_fields())
    for monitor in MONITORS:
        assert monitor.fields
        assert set(monitor.fields) <= fields, monitor.name
    for bad, good in CASES.values():
        assert bad.keys() | good.keys() <= METRICS.keys()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_alarm_where_it_must_and_silence_where_it_must_not(name: str, seed: int) -> None:
    bad, good = CASES[name]
    verdict = _verdict(_history(seed, **bad), name)
    assert verdict.state == "alarm"
    sentence = verdict.sentence()
    assert f"(health.{name})" in sentence
    assert all(field in sentence for field in verdict.monitor.fields)
    assert _verdict(_history(seed, **good), name).state == "ok"
    others = [v for v in check_health(_history(seed, **bad), HealthConfig()) if v.monitor.name != name]
    assert {v.state for v in others} <= {"ok", "not measured"}


@pytest.mark.parametrize("name", CASES)
def test_a_monitor_is_switched_off_by_null_and_says_when_it_sees_nothing(name: str) -> None:
    assert _verdict(_history(**CASES[name][0]), name, **{name: None}).state == "off"
    assert _verdict(_history(), name).state == "not measured"
    gaps = [{**r, **{m: math.nan for m in CASES[name][0]}} for r in _history()]
    assert _verdict(gaps, name).state == "not measured"


def test_the_warm_start_is_not_watched() -> None:
    warm = [{"step": float(i), "phase": 0.0, "entropy": 50.0} for i in range(20)]
    assert check_health(warm + _history(**CASES["entropy_collapse"][1]), HealthConfig()) == check_health(
        _history(**CASES["entropy_collapse"][1]), HealthConfig()
    )


numbers = st.floats(-5, 5).map(lambda x: round(x, 6))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(numbers, numbers, st.floats(0.1, 2)), min_size=6, max_size=30), numbers, st.floats(0.01, 100))
def test_reward_divergence_ignores_shift_and_factor(rows, shift: float, factor: float) -> None:
    def records(a, b):
        return [
            {"step": float(i), "reward/mean": a + b * t, "reward/std": b * s, **({"reward/held_out": a + b * h} if i % 3 == 0 else {})}
            for i, (t, h, s) in enumerate(rows)
        ]

    plain, moved = reward_divergence(records(0.0, 1.0), 3), reward_divergence(records(shift, factor), 3)
    held = [h for i, (_, h, _) in enumerate(rows) if i % 3 == 0]
    if len(set(held)) == len(held) and min(abs(a - b) for a in held for b in held if a != b) > 1e-4:
        assert [s for s, _ in moved] == [s for s, _ in plain]
        assert [v for _, v in moved] == pytest.approx([v for _, v in plain], abs=1e-6, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.01, 10), min_size=5, max_size=30),
    st.floats(0.01, 100),
    st.sampled_from(["entropy", "rollout/prefix_cache_hit_rate"]),
)
def test_shares_of_an_earlier_level_ignore_the_unit(values: list[float], factor: float, metric: str) -> None:
    name = {"entropy": "entropy_collapse"}.get(metric, "prefix_cache_drop")
    plain, scaled = (_verdict([{"step": float(i), metric: f * v} for i, v in enumerate(values)], name).series for f in (1.0, factor))
    assert [v for _, v in scaled] == pytest.approx([v for _, v in plain])


def test_kl_budget_is_nats_per_response() -> None:
    records = [{"step": 1.0, "kl_ref": 0.02, "response_length/mean": 300.0}, {"step": 2.0, "kl_ref": 0.03}]
    assert kl_budget(records) == [(1.0, pytest.approx(6.0))]


def test_a_watch_tells_each_start_once_and_a_resumed_one_repeats_nothing() -> None:
    def record(i):
        return {"phase": 1.0, "staleness/max": float(i in (3, 4, 5, 9))}

    watch = HealthWatch(HealthConfig())
    told = [i for i in range(12) if watch.observe(i, record(i))]
    assert told == [3, 9]
    for cut in range(12):
        resumed = HealthWatch(HealthConfig(), [record(i) | {"step": float(i)} for i in range(cut)])
        assert [i for i in range(cut, 12) if resumed.observe(i, record(i))] == [i for i in told if i >= cut]


def _sick_run(path):
    run = write_run(path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, record in enumerate(r for r in lines if r["phase"] == 1.0):
        record |= {"groups/degenerate": 15.0, "kl_ref": 0.2 * i, "pass_at_k/1": 0.1, "staleness/max": float(i == 3)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return run


def test_summary_and_report_show_alarms_and_their_fields(tmp_path) -> None:
    run = _sick_run(tmp_path / "r")
    history = load_history(run)
    assert [v.monitor.name for v in history.health() if v.firing] == ["kl_budget", "degenerate_groups"]
    figure = next(f for f in final_figures(history) if f.label == "Health")
    assert figure.good is False
    assert figure.value == "2 alarms"
    assert "earlier: version_gap" in figure.note
    out = io.StringIO()
    print_summary(run, Console(file=out, width=200))
    assert "health.degenerate_groups" in out.getvalue()
    html = write_report(run).read_text()
    for text in ("<h2>Health</h2>", "objective.kl_coef", "rollout.group_size", "Reward over KL budget", "Token efficiency", "recovered"):
        assert text in html
    (run / "config.yaml").write_text(
        yaml.safe_dump(Config.model_validate({"health": {"kl_budget": None, "degenerate_groups": None}}).model_dump(mode="json"))
    )
    assert next(f for f in final_figures(load_history(run)) if f.label == "Health").value == "no alarm at the end"


def test_amdahl_bounds(tmp_path) -> None:
    history = load_history(write_run(tmp_path / "r"))
    bounds = amdahl_bounds(history)
    assert math.fsum(b.share for b in bounds) == pytest.approx(1.0)
    rl = [r for r in history.records if r["phase"] == 1.0]
    step = sum(v for r in rl for k, v in r.items() if k.startswith("time/")) / len(rl)
    for b in bounds:
        assert b.seconds == pytest.approx(sum(r.get(f"time/{b.phase}", 0.0) for r in rl) / len(rl))
        assert b.share == pytest.approx(b.seconds / step)
        assert b.bound == pytest.approx(step / (step - b.seconds))
        assert b.half == pytest.approx(step / (step - b.seconds + b.seconds / 2))
    html = write_report(tmp_path / "r").read_text()
    assert "Speed-up at most" in html
    assert "Speed-up at half its time" in html
    for value in (max(b.bound for b in bounds), max(b.half for b in bounds)):
        assert f"{value:.2f}x" in html
