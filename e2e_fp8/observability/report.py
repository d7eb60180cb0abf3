"""``report.html`` of a run: one file with its plots, tables and figures, no scripts and nothing loaded from elsewhere."""

import os
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from e2e_fp8.errors import UserError
from e2e_fp8.observability.charts import Line, line_chart, short, stacked_bars
from e2e_fp8.observability.figures import Figure, amdahl_bounds, duration, final_figures
from e2e_fp8.observability.health import kl_budget
from e2e_fp8.observability.history import RunHistory, flatten, load_history
from e2e_fp8.observability.names import METRICS, OPERANDS, PASS_AT_K, PHASES, TILE_STATISTICS
from e2e_fp8.observability.style import STYLE

CARDS = ("Held-out reward", "Train reward", "Mismatch KL, mean", "Receipts", "Rollout speed", "Wall time")
MAX_SAMPLES = 12


def write_report(run_dir: Path) -> Path:
    """Read the run folder and write ``report.html`` into it, replacing an older one at once.

    Returns:
        Path of the report.

    Raises:
        UserError: No such folder, no metrics in it, a file that does not parse, or the report cannot be written.
    """
    history = load_history(run_dir)
    path = Path(run_dir) / "report.html"
    temporary = path.with_suffix(".html.tmp")
    try:
        temporary.write_text(_page(history), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); free space or permissions, then run `e2e-fp8 report {run_dir}`."
        ) from error
    return path


def _page(history: RunHistory) -> str:
    name = str(history.config.get("run", {}).get("name", history.run_dir.name))
    figures = final_figures(history)
    sections = [
        _health_table(history),
        _section("Learning", _learning(history)),
        _section("Trainer and engine", _mismatch(history)),
        _section("Optimization", _optimization(history)),
        _section("Critic", _critic(history)),
        _section("FP8 tiles", _tiles(history)),
        _section("Cost", _cost(history)),
        _bounds_table(history),
        _section("Warm start", _warm_start(history)),
    ]
    tables = [
        _figures_table(figures),
        _receipts_table(history.receipts),
        _samples_table(history.samples),
        _last_values_table(history),
        _pairs_table("Configuration", "config.yaml", flatten(history.config)),
        _pairs_table("Environment", "environment.json", flatten(history.environment)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(name)} · FP8 RL run</title><style>{STYLE}</style></head>'
        f"<body><main>"
        f"<header><h1>{escape(name)}</h1><p>{_subtitle(history)}</p></header>{_cards(figures)}"
        f"{''.join(sections)}{''.join(tables)}</main></body></html>\n"
    )


def _subtitle(history: RunHistory) -> str:
    config = flatten(history.config)
    warm = sum(r.get("phase") == 0 for r in history.records)
    steps = f"{len(history.records) - warm} RL steps" + (f" after {warm} warm-start steps" if warm else "")
    model = history.config.get("model", {}).get("hf_path") or config.get("model.architecture")
    precision = [config.get(f"numerics.{side}_precision") for side in ("training", "rollout")]
    parts = [model, f"{precision[0]} trainer, {precision[1]} rollout" if all(precision) else None, config.get("task.name"), steps]
    times = history.values("time")
    return escape(" · ".join([str(p) for p in parts if p] + ([duration(times[-1])] if times else [])))


def _cards(figures: Sequence[Figure]) -> str:
    chosen = [f for f in figures if f.label in CARDS]
    chosen.sort(key=lambda f: CARDS.index(f.label))
    return '<div class="cards">' + "".join(_card(f) for f in chosen) + "</div>"


def _card(figure: Figure) -> str:
    mark = {True: " good", False: " bad", None: ""}[figure.good]
    return (
        f'<div class="card{mark}"><div class="label">{escape(figure.label)}</div><div class="value">{escape(figure.value)}</div>'
        f'<div class="note">{escape(figure.note)}</div></div>'
    )


def _section(title: str, charts: Sequence[str]) -> str:
    charts = [c for c in charts if c]
    return f'<section><h2>{escape(title)}</h2><div class="charts">{"".join(charts)}</div></section>' if charts else ""


def _chart(history: RunHistory, title: str, names: dict[str, str], caption: str = "", *, from_zero: bool = True, phase: float = 1.0) -> str:
    """A line chart of ``{metric name: legend}``; empty text when none of them was logged in that phase."""
    lines = [Line(label=label, steps=s, values=v) for name, label in names.items() for s, v in [history.series(name, phase)] if s]
    unit = METRICS[next(iter(names))].unit
    return _figure(title, caption, line_chart(lines, from_zero=from_zero), unit) if lines else ""


def _figure(title: str, caption: str, drawing: str, unit: str = "") -> str:
    unit = f"<small>{escape(unit)}</small>" if unit else ""
    caption = f"<p>{escape(caption)}</p>" if caption else ""
    return f"<figure><figcaption>{escape(title)} {unit}</figcaption>{caption}{drawing}</figure>"


def _learning(history: RunHistory) -> list[str]:
    steps, means = history.series("reward/mean")
    lines = [Line(label="train, mean of the step", steps=steps, values=means)] if steps else []
    held_steps, held = history.series("reward/held_out")
    if held_steps:
        lines.append(Line(label="held-out", steps=held_steps, values=held, markers=True))
    reward = _figure("Reward", "", line_chart(lines, from_zero=True)) if lines else ""
    return [
        reward,
        _chart(history, "Held-out pass@k", {f"pass_at_k/{k}": f"k = {k}" for k in PASS_AT_K[:8]}),
        *_efficiency(history),
        _chart(history, "Response length", {"response_length/mean": "mean", "response_length/max": "longest"}),
        _chart(history, "Entropy", {"entropy": "entropy"}),
        _chart(history, "Truncated responses", {"response/truncated_fraction": "cut off at the length limit"}),
        _chart(history, "Groups", {"groups/total": "all", "groups/degenerate": "equal rewards, no signal"}),
    ]


def _efficiency(history: RunHistory) -> list[str]:
    """Reward over what it cost in responses and tokens, and KL to the start with reward over it."""
    records = [r for r in history.records if r.get("phase", 1.0) == 1.0]
    responses, tokens = (_so_far(records, name) for name in ("response/count", "tokens/rollout"))
    budget = dict(kl_budget(records))
    # before the first update the policy is its own start
    spent = {records[0]["step"] - 1: 0.0} | budget if budget else {}
    charts = []
    for title, caption, x_of, unit in (
        ("Sample efficiency", "Reward over the responses sampled so far", responses, "responses"),
        ("Token efficiency", "Reward over the tokens sampled so far", tokens, "tokens"),
        ("Reward over KL budget", "KL to the start, 5 to 15 nats per response are normal", spent, "nats"),
    ):
        pairs = (("reward/mean", "train"), ("reward/held_out", "held-out"))
        lines = [_over(history, name, label, x_of, joined=x_of is not spent) for name, label in pairs]
        if any(line.steps for line in lines):
            charts.append(_figure(title, caption, line_chart(lines, from_zero=True, x_name=unit), f"against {unit}"))
    if budget:
        line = Line(label="KL to the start", steps=list(budget), values=list(budget.values()))
        caption = "KL per response token times mean response length; 5 to 15 nats are normal, health.kl_budget is the alarm"
        charts.append(_figure("KL budget", caption, line_chart([line], from_zero=True), "nats per response"))
    return charts


def _so_far(records: Sequence[dict[str, float]], name: str) -> dict[float, float]:
    """Sum of a metric up to each step, 0 before the first; nothing where no step has it."""
    if not any(name in r for r in records):
        return {}
    totals = accumulate((r.get(name, 0.0) for r in records), initial=0.0)
    return dict(zip((records[0]["step"] - 1, *(r["step"] for r in records)), totals, strict=True))


def _over(history: RunHistory, name: str, label: str, x_of: dict[float, float], *, joined: bool) -> Line:
    """A metric over another quantity of the same step, in step order."""
    pairs = [(x_of[s], v) for s, v in zip(*history.series(name, 1.0), strict=True) if s in x_of]
    return Line(label=label, steps=[x for x, _ in pairs], values=[v for _, v in pairs], markers=name == "reward/held_out", joined=joined)


def _mismatch(history: RunHistory) -> list[str]:
    log_probs = {"train_rollout_logprob_abs_diff/mean": "mean", "train_rollout_logprob_abs_diff/max": "largest"}
    probs = {
        "training/rollout_probs_diff_mean": "mean",
        "training/rollout_probs_diff_max": "largest",
        "training/rollout_probs_diff_std": "std",
    }
    weights = {"rollout_corr/rollout_is_mean": "mean", "rollout_corr/rollout_is_min": "smallest", "rollout_corr/rollout_is_max": "largest"}
    corrected = {
        "rollout_corr/rollout_rs_masked_fraction": "tokens rejected",
        "rollout_corr/rollout_rs_seq_masked_fraction": "sequences with a rejected token",
        "rollout_corr/rollout_is_oob_ratio": "tokens whose weight a bound changed",
    }
    uncovered = {"router_replay/uncovered_tokens": "response tokens", "router_replay/masked_tokens": "left out of the loss"}
    covered, changed = METRICS["router_replay/coverage"], METRICS["router_replay/changed_ids"]
    return [
        _chart(history, "Mismatch KL", {"mismatch_kl": "mismatch_kl"}, METRICS["mismatch_kl"].description),
        _chart(history, "Log-probability difference", log_probs, "|log p_train - log p_rollout| over response tokens"),
        _chart(history, "Probability difference", probs, "|p_train - p_rollout| over response tokens"),
        _chart(history, "Importance weights", weights, "p_train / p_rollout before truncation", from_zero=False),
        _chart(history, "Effective sample size", {"rollout_corr/rollout_is_eff_sample_size": "of the importance weights"}, from_zero=False),
        _chart(history, "Held back by the correction", corrected, "A rejected token is out of the loss; a weight stays in its denominator"),
        _chart(history, "Router replay coverage", {"router_replay/coverage": "response tokens"}, covered.description),
        _chart(history, "Not replayed", uncovered),
        _chart(history, "Choices changed by router replay", {"router_replay/changed_ids": "all layers"}, changed.description),
    ]


def _optimization(history: RunHistory) -> list[str]:
    clipped = {"clip_fraction/low": "at 1 - clip_low", "clip_fraction/high": "at 1 + clip_high", "clip_fraction/dual": "at the dual clip"}
    return [
        _chart(history, "Clip fractions", clipped),
        _chart(
            history,
            "Clipped below, A < 0",
            {f"clip_calibration/{n}": n.replace("_", " ") for n in ("high_precision", "fp8_configured", "fp8_calibrated")},
            "At the steps with a shadow pass (calibrated clipping)",
        ),
        _chart(history, "Clip ranges in use", {"clip_calibration/clip_low": "clip_low", "clip_calibration/clip_high": "clip_high"}),
        _chart(history, "Gradient norm", {"grad_norm": "before clipping"}),
        _chart(history, "Loss", {"loss": "policy loss per token"}, from_zero=False),
        _chart(history, "KL to the reference", {"kl_ref": "kl_ref"}),
        _chart(history, "Learning rate", {"learning_rate": "learning rate"}),
        _chart(history, "Skipped optimizer steps", {"skipped_steps": "skipped"}) if any(history.values("skipped_steps")) else "",
    ]


def _critic(history: RunHistory) -> list[str]:
    """Nothing for a run without one."""

    def spread(name: str) -> dict[str, str]:
        return {f"critic/{name}/{statistic}": label for statistic, label in (("mean", "mean"), ("max", "largest"), ("min", "smallest"))}

    ends = {"critic/values/mean": "values", "critic/returns/mean": "returns"}
    return [
        _chart(history, "Value loss", {"critic/vf_loss": "per response token"}),
        _chart(history, "Explained variance", {"critic/vf_explained_var": "of the returns, by the values before the update"}),
        _chart(history, "Values and returns", ends, "Means over response tokens", from_zero=False),
        _chart(history, "Value clip fraction", {"critic/vf_clipfrac": "tokens whose clipped error is the larger one"}),
        _chart(history, "Advantages", spread("advantages"), "As the policy's loss has them", from_zero=False),
        _chart(history, "Critic's gradient norm", {"critic/grad_norm": "before clipping"}),
        _chart(history, "Critic's skipped steps", {"critic/skipped_steps": "skipped"})
        if any(history.values("critic/skipped_steps"))
        else "",
    ]


def _tiles(history: RunHistory) -> list[str]:
    charts = []
    for operand in OPERANDS:
        names = {f"tiles/{operand}/{s}": s.replace("_", " ").replace("e4m3", "E4M3") for s in TILE_STATISTICS}
        charts.append(_chart(history, operand.capitalize(), names))
    return charts


def _cost(history: RunHistory) -> list[str]:
    records = [r for r in history.records if r.get("phase", 1.0) == 1.0 and any(f"time/{p}" in r for p in PHASES)]
    phases = [p for p in PHASES if any(r.get(f"time/{p}") for r in records)]
    bars = ""
    if phases:
        layers = {p: [r.get(f"time/{p}", 0.0) for r in records] for p in phases}
        bars = _figure("Time per phase", "Each RL step", stacked_bars([r["step"] for r in records], layers, unit="s"), "s")
    return [
        bars,
        _chart(history, "Tokens per second", {"rollout/tokens_per_s": "rollout", "train/tokens_per_s": "update"}),
        _chart(
            history,
            "Memory",
            {
                f"memory/{n}": n.removesuffix("_gib").replace("_", " ")
                for n in ("trainer_host_gib", "engine_host_gib", "trainer_device_gib")
            },
        ),
        _chart(history, "Memory in use", {f"memory/{n}_used_fraction": n for n in ("host", "device")}),
        _chart(history, "Weight sync", {"sync/seconds": "seconds of the delivery"}),
    ]


def _warm_start(history: RunHistory) -> list[str]:
    return [
        _chart(history, "Supervised loss", {"sft/loss": "per answer token"}, phase=0.0),
        _chart(history, "Warm-start gradient norm", {"grad_norm": "before clipping"}, phase=0.0),
    ]


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: Sequence[object], mark: str = "") -> str:
    return f'<tr class="{mark}">' + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>"


def _health_table(history: RunHistory) -> str:
    """Alarms first; what sees nothing in this run is folded away."""
    order = ("alarm", "recovered", "ok", "not measured", "off")
    rows: list[str] = []
    unseen: list[str] = []
    for v in sorted(history.health(), key=lambda v: order.index(v.state)):
        fields = ", ".join(v.monitor.fields)
        advice = f"{v.monitor.advice} Fields: {fields}." if v.alarms else f"Needs {v.monitor.needs}." if not v.series else ""
        span = f"{v.alarms[0][0]:g} to {v.alarms[-1][0]:g}" if len(v.alarms) > 1 else f"{v.alarms[0][0]:g}" if v.alarms else ""
        last = short(v.series[-1][1]) if v.series else ""
        limit = f"{'<' if v.monitor.below else '>'} {short(v.threshold)}" if v.threshold is not None else ""
        row = _row([v.monitor.label, v.state, last, limit, span, advice], "bad" if v.firing else "")
        (unseen if v.state in ("not measured", "off") else rows).append(row)
    lead = '<p class="lead">Thresholds are the fields of the health section; an alarm changes nothing in the run.</p>'
    head = ["Monitor", "State", "Last", "Alarm at", "Alarms, steps", "Advice"]
    folded = f"<details><summary>{len(unseen)} monitors not measured or off</summary>{_table(head, unseen)}</details>" if unseen else ""
    return f'<section class="health"><h2>Health</h2>{lead}{_table(head, rows) if rows else ""}{folded}</section>'


def _bounds_table(history: RunHistory) -> str:
    bounds = amdahl_bounds(history)
    if not bounds:
        return ""
    rows = [_row([b.phase, f"{b.seconds:.3f}", f"{100 * b.share:.1f} %", f"{b.half:.2f}x", f"{b.bound:.2f}x"]) for b in bounds]
    lead = (
        '<p class="lead">How fast a whole RL step could get if one phase got faster and the others did not (Amdahl): '
        "step / (step - phase / 2) and step / (step - phase).</p>"
    )
    head = ["Phase", "Seconds per RL step", "Share", "Speed-up at half its time", "Speed-up at most"]
    return f"<section><h2>Bounds</h2>{lead}{_table(head, rows)}</section>"


def _figures_table(figures: Sequence[Figure]) -> str:
    rows = [_row([f.label, f.value, f.note], "bad" if f.good is False else "") for f in figures]
    return f"<section><h2>Final figures</h2>{_table(['Figure', 'Value', 'Note'], rows)}</section>"


def _receipts_table(receipts: Sequence[dict[str, Any]]) -> str:
    if not receipts:
        return ""
    rows = []
    for r in receipts:
        verdict = ("passed" if r["passed"] else "FAILED") if r.get("tensors") else "not checked"
        cells = [r["step"], r.get("policy_version", ""), verdict, r.get("tensors", ""), f"{r.get('bytes', 0):,}"]
        rows.append(_row([*cells, f"{r.get('seconds', 0.0):.3f}", str(r.get("digest", ""))[:16]], "bad" if verdict == "FAILED" else ""))
    head = ["Step", "Policy version", "Verdict", "Tensors", "Bytes", "Seconds", "Digest"]
    lead = '<p class="lead">Bytes of trainer and engine, compared after each weight sync.</p>'
    return f"<section><h2>Receipts</h2>{lead}{_table(head, rows)}</section>"


def _samples_table(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    shown = samples[-MAX_SAMPLES:]
    rows = [_row([s["step"], s.get("prompt", ""), s.get("response", ""), s.get("answer", ""), s.get("reward", "")]) for s in shown]
    return f"<section><h2>Last samples</h2>{_table(['Step', 'Prompt', 'Response', 'Answer', 'Reward'], rows)}</section>"


def _last_values_table(history: RunHistory) -> str:
    rows = []
    for name, metric in METRICS.items():
        values = history.values(name) if name != "step" else []
        if values:
            cells = [name, short(values[0]), short(values[-1]), short(min(values)), short(max(values)), metric.unit, metric.description]
            rows.append(_row(cells))
    head = ["Metric", "First", "Last", "Smallest", "Largest", "Unit", "Meaning"]
    return f"<details><summary>All metrics</summary>{_table(head, rows)}</details>"


def _pairs_table(title: str, file_name: str, pairs: dict[str, str]) -> str:
    if not pairs:
        return f"<details><summary>{escape(title)}</summary><p>{escape(file_name)} is not in the run folder.</p></details>"
    return f"<details><summary>{escape(title)}</summary>{_table(['Name', 'Value'], [_row(p) for p in pairs.items()])}</details>"
