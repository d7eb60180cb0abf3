"""report.html: complete, well-formed, self-contained, and right about what it says."""

import itertools
import json
import random
import re
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic_run import receipt, write_run

from e2e_fp8.errors import UserError
from e2e_fp8.observability.charts import MAX_BARS, Line, line_chart, short, stacked_bars
from e2e_fp8.observability.figures import duration, final_figures
from e2e_fp8.observability.history import flatten, load_history
from e2e_fp8.observability.progress import print_summary
from e2e_fp8.observability.report import write_report

VOID = {"meta", "br", "hr", "img", "link"}


class Checker(HTMLParser):
    """Balanced tags, every attribute seen, all text."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.tags, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(path):
    checker = Checker()
    checker.feed(path.read_text())
    checker.close()
    assert checker.open == []
    return checker


def test_report_is_complete_and_self_contained(tmp_path):
    path = write_report(write_run(tmp_path / "r"))
    assert path == tmp_path / "r" / "report.html"
    page = parse(path)
    text = " ".join(page.text)
    for title in (
        "Reward", "Mismatch KL", "Response length", "Entropy", "Time per phase", "Clip fractions", "Weights", "Activations", "Gradients",
        "Supervised loss", "Configuration", "Environment", "Final figures", "Receipts",
    ):  # fmt: skip
        assert title in text, title
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href", "srcset") or a[0].startswith("on")]
    assert not re.search(r"https?:|url\(|@import", path.read_text())
    assert page.tags.count("svg") >= 12
    assert "prefers-color-scheme:dark" in path.read_text()
    assert "nan" not in re.findall(r'(?:points|x|y|cy|height)="([^"]*)"', path.read_text())
    assert not list((tmp_path / "r").glob("*.tmp"))


def test_report_states_the_true_numbers(tmp_path):
    run = write_run(tmp_path / "r", seed=5)
    text = " ".join(parse(write_report(run)).text)
    assert "0.300 → 0.750" in text
    assert "31 passed, 0 failed" in text
    history = load_history(run)
    assert f"max {short(max(history.values('mismatch_kl')))}" in text
    for digest in (r["digest"][:16] for r in history.receipts):
        assert digest in text
    assert "training.warm_start.steps" in text
    assert "2.11.0" in text


def test_calibrated_clipping_shows_its_interval_its_cost_and_where_the_range_went(tmp_path):
    run = write_run(tmp_path / "r")
    label = "Calibrated clipping, shadow passes"
    assert label not in [f.label for f in final_figures(load_history(run))]
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["objective"]["calibration"]["interval"] = 8
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rl = [r for r in records if r["phase"] == 1.0]
    for i, record in enumerate(rl):
        record |= {"clip_calibration/clip_low": 0.2 + 0.01 * i, "clip_calibration/passes": float(i % 2)}
        record |= {"time/shadow_pass": 0.25} if i % 2 else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (figure,) = [f for f in final_figures(load_history(run)) if f.label == label]
    assert figure.value == "one in 8 optimizer steps, 15 in all"
    total = sum(v for r in rl for name, v in r.items() if name.startswith("time/"))
    assert figure.note == f"0.25 s a pass, {100 * 15 * 0.25 / total:.1f} % of the RL steps' time; clip_low 0.2 → 0.49"
    text = " ".join(parse(write_report(run)).text)
    assert label in text
    assert figure.note in text


def test_what_the_correction_and_the_dual_clip_hold_back_is_drawn(tmp_path):
    run = write_run(tmp_path / "r")
    shown = ("tokens rejected", "sequences with a rejected token", "tokens whose weight a bound changed", "at the dual clip")
    before = " ".join(parse(write_report(run)).text)
    assert not [text for text in shown if text in before]
    names = ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction", "rollout_corr/rollout_is_oob_ratio")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record |= dict.fromkeys((*names, "clip_fraction/dual"), 0.125) if record["phase"] == 1.0 else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    after = " ".join(parse(write_report(run)).text)
    assert [text for text in shown if text in after] == list(shown)


def test_failed_and_unchecked_receipts_are_visible(tmp_path):
    run = write_run(tmp_path / "r")
    rows = [receipt(s, random.Random(s)) for s in range(4)]
    rows[1]["passed"] = False
    rows[2] |= {"tensors": 0, "digest": "", "passed": False}
    (run / "receipts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert load_history(run).receipt_counts() == (2, 1, 1)
    html = write_report(run).read_text()
    assert "2 passed, 1 failed" in html
    assert html.count('<tr class="bad"><td>1</td>') == 1
    assert "not checked" in html


def test_hostile_text_is_escaped(tmp_path):
    run = write_run(tmp_path / "r")
    evil = "<script>alert(1)</script>&\"'"
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": evil, "response": evil, "answer": evil, "reward": 0.0}) + "\n")
    (run / "environment.json").write_text(json.dumps({evil: {evil: [evil]}}))
    page = parse(write_report(run))
    assert "script" not in page.tags
    assert evil in page.text


@pytest.mark.parametrize(("warm", "steps"), [(0, 1), (3, 0), (1, 1), (0, 400)])
def test_short_and_long_runs(tmp_path, warm, steps):
    run = write_run(tmp_path / "r", warm_steps=warm, rl_steps=steps)
    page = parse(write_report(run))
    assert any("Time per phase" in t for t in page.text) == (steps > 0)
    assert any("Supervised loss" in t for t in page.text) == (warm > 0)
    print_summary(run)


def test_minimal_run_with_metrics_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    assert "config.yaml is not in the run folder" in " ".join(parse(write_report(tmp_path)).text)
    print_summary(tmp_path)


@pytest.mark.parametrize("action", [write_report, print_summary])
def test_unusable_run_folders(tmp_path, action):
    with pytest.raises(UserError, match="does not exist"):
        action(tmp_path / "nothing")
    with pytest.raises(UserError, match="has no metrics"):
        action(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has no metrics"):
        action(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(UserError, match="line 2 has no step"):
        action(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{{{\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        action(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml does not parse"):
        action(tmp_path)


def pixels(svg, tag, *names):
    return [tuple(float(re.search(rf' {n}="([^"]*)"', m)[1]) for n in names) for m in re.findall(rf"<{tag} [^>]*>", svg)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
@example([0.0, 5e-324])
@example([1e6, 1e6 + 2e-10])
def test_line_chart_keeps_points_inside_and_in_order(values):
    svg = line_chart([Line(label="a", steps=list(range(len(values))), values=values)])
    points = pixels(svg, "circle", "cx", "cy")
    assert len(points) == len(values)
    assert all(57 <= x <= 549 and 9 <= y <= 221 for x, y in points)
    by_value = sorted(zip(values, points, strict=True), key=lambda p: p[0])
    assert all(lower[1][1] >= higher[1][1] for lower, higher in itertools.pairwise(by_value))


def test_line_chart_scale_is_exact():
    svg = line_chart([Line(label="a", steps=[0, 5, 10], values=[0.0, 1.0, 0.5])])
    (_, bottom), (_, top), (_, middle) = pixels(svg, "circle", "cx", "cy")
    assert (bottom, top) == (220.0, 10.0)
    assert middle == 115.0


def test_a_spike_survives_thinning():
    values = [1.0] * 20_000
    values[12_345] = 100.0
    svg = line_chart([Line(label="a", steps=list(range(20_000)), values=values)])
    points = re.search(r'polyline class="line0" points="([^"]*)"', svg)[1].split()
    assert len(points) < 2000
    ys = [float(p.split(",")[1]) for p in points]
    assert min(ys) == 10.0  # the axis ends at 100


def test_bars_stack_to_the_total():
    svg = stacked_bars([1, 2], {"a": [1.0, 3.0], "b": [3.0, 1.0]})
    heights = [h for (h,) in pixels(svg, "rect", "height")]
    assert heights == [52.5, 157.5, 157.5, 52.5]
    assert len(re.findall("<rect", stacked_bars(list(range(1000)), {"a": [1.0] * 1000}))) <= MAX_BARS


def test_small_formats():
    assert [short(x) for x in (0, 0.5, 1234.4, 1.23456e-5, 2e7, float("nan"), 0.001)] == [
        "0",
        "0.5",
        "1,234",
        "1.23e-5",
        "2e7",
        "n/a",
        "0.001",
    ]
    assert [duration(x) for x in (4.24, 185, 3720, 59.99, 119.7)] == ["4.2 s", "3 min 05 s", "1 h 02 min", "60.0 s", "2 min 00 s"]
    assert flatten({"a": {"b": None, "c": [1, 2], "d": {}, "e": True}}) == {"a.b": "null", "a.c": "1, 2", "a.d": "{}", "a.e": "true"}


def test_points_that_are_not_joined_have_no_line_and_keep_their_captions():
    points = {"steps": [0.0, 2.0, 1.0], "values": [3.0, 4.0, 5.0]}
    joined, apart = (line_chart([Line(label="reward", joined=j, **points)], x_name="nats") for j in (True, False))
    assert joined.count("<polyline") == 1
    assert "<polyline" not in apart
    assert all(f"<title>reward, nats {x:g}: {short(v)}</title>" in apart for x, v in zip(points["steps"], points["values"], strict=True))


@pytest.mark.parametrize("x_name", ["step", "responses"])
def test_the_horizontal_axis_is_named_and_no_number_meets_the_name(x_name):
    chart = line_chart([Line(label="reward", steps=[0.0, 12_000.0], values=[0.0, 1.0])], x_name=x_name)
    texts = re.findall(r'<text class="tick" x="([\d.]+)" y="240"[^>]*>([^<]+)</text>', chart)
    assert texts[0] == ("0", x_name)
    assert len(texts) > 3
    assert all(float(x) - 3 * len(number) > 5 * len(x_name) for x, number in texts[1:])


def test_efficiency_starts_with_the_evaluation_before_rl(tmp_path):
    write_run(tmp_path, warm_steps=4, rl_steps=10)
    text = write_report(tmp_path).read_text()
    assert "<title>held-out, tokens 0: 0.3</title>" in text
