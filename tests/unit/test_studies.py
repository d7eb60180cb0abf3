"""Studies: their files, the order of runs, what a failed or finished run does to the others, and the page."""

import json
import math
import random
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from study_cases import finished, plan_of, written
from synthetic_run import write_run

from e2e_fp8.cli import main as cli
from e2e_fp8.config.load import dump_config, load_config
from e2e_fp8.config.objective import KIND_DEFAULTS
from e2e_fp8.errors import ConfigError
from e2e_fp8.observability.history import load_history
from e2e_fp8.studies.claims import judge, parse_claim
from e2e_fp8.studies.curves import curve_of
from e2e_fp8.studies.report import write_page
from e2e_fp8.studies.results import TAIL, figure_of
from e2e_fp8.studies.runner import StudyRunner
from e2e_fp8.studies.runs import planned_runs, start_run
from e2e_fp8.studies.schema import Figure, arm_config, as_overrides, load_study

REPO = Path(__file__).resolve().parents[2]
FILES = sorted((REPO / "configs" / "studies").glob("*.yaml"))
# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_study_parses_with_a_cpu_and_a_gpu_size(path):
    study = load_study(path)
    assert next(iter(study.sizes)) == "cpu"
    assert "h200" in study.sizes
    assert len(study.seeds) >= 3
    assert study.expect
    cpu = [arm_config(study, path, "cpu", arm) for arm in study.arms]
    assert {cfg.run.backend for cfg in cpu} == {"auto"}
    assert len({dump_config(cfg) for cfg in cpu}) == len(study.arms), "two arms are the same run"
    shown = [arm for arms in study.panels.values() for arm in arms]
    assert sorted(shown) == sorted(study.arms) or not shown


def test_objectives_has_every_objective_and_both_precisions_of_three():
    path = REPO / "configs" / "studies" / "objectives.yaml"
    study = load_study(path)
    arms = [arm_config(study, path, "cpu", arm) for arm in study.arms]
    assert {cfg.objective.kind for cfg in arms} == set(KIND_DEFAULTS)
    assert any(cfg.correction.loss_type == "reinforce" for cfg in arms)
    found = {(c.objective.kind, c.numerics.training_precision, c.numerics.rollout_precision, c.correction.rollout_is) for c in arms}
    for kind in ("grpo", "dapo", "gspo"):
        for precision in ("fp8", "bf16"):
            level = "sequence" if kind == "gspo" else "token"
            assert {(kind, precision, precision, level), (kind, precision, precision, None)} <= found
        calibrated = {c.correction.rollout_is for c in arms if c.objective.kind == kind and c.objective.calibration.interval}
        assert calibrated == {level, None}
    assert {c.numerics.training_precision for c in arms if c.objective.advantage == "gae"} == {"fp8", "bf16"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"arms": {"a": {"run.seed": 3}}, "pairs": None, "expect": None}, ("arms.a: run.seed is set by the study itself",)),
        ({"start": {}, "set": {"model.hf_path": "x"}}, ("set: model.hf_path is set by the study itself",)),
        ({"arms": {"a": {"run.step": 3}}, "pairs": None, "expect": None}, ("size cpu, arm a", "did you mean run.steps")),
        ({"arms": {"../a": {}}, "pairs": None, "expect": None}, ("arms: '../a' cannot be part of a file name",)),
        ({"arms": {"12": {}}, "pairs": None, "expect": None}, ("arms: '12' cannot be part of a file name, or is a number",)),
        ({"seeds": [1, 1]}, ("names a seed twice",)),
        ({"curves": ["reward/meen"]}, ("'reward/meen' is no metric",)),
        ({"panels": {"p": ["middle"]}}, ("panels.p: 'middle' is no arm of this study: its arms are low, high",)),
        ({"expect": [{"claim": "reward high > low", "source": ""}]}, ("not of the form",)),
        ({"expect": [{"claim": "reward: high", "source": ""}]}, ("not of the form",)),
        ({"expect": [{"claim": "reward: 1 > 0", "source": ""}]}, ("not of the form",)),
        ({"expect": [{"claim": "speed: high > low", "source": ""}]}, ("'speed', which is no figure",)),
        ({"expect": [{"claim": "reward: high > middle", "source": ""}]}, ("'middle', which is neither an arm",)),
        ({"figures": {"r": {"metric": "reward/mean", "over": "median"}}, "expect": None}, ("figures.r.over is 'median'",)),
        ({"sizes": {"cpu": {"base": "none.yaml"}}}, ("none.yaml does not exist",)),
        ({"sizes": {"cpu": {"base": "base.yaml", "arms": ["middle"]}}}, ("sizes.cpu.arms: 'middle' is no arm",)),
        ({"title": None}, ("title",)),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, capsys, changes, parts):
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_study(path)
    assert cli.main(["study", str(path)]) == 2
    message = capsys.readouterr().err
    assert message == f"e2e-fp8: {caught.value}\n"
    assert all(part in message for part in ("trial.yaml", *parts)), message


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trial.yaml", "--size", "huge"], "no size of this study: it has cpu, big"),
        (["trial.yaml", "--arms", "middle"], "--arms middle is not in"),
        (["trial.yaml", "--seeds", "7"], "--seeds 7 is not in"),
        (["trial.yaml", "--jobs", "0"], "--jobs is 0"),
        (["report", "trial.yaml"], "No run of"),
        (["erase", "trial.yaml"], "write 'e2e-fp8 study STUDY.yaml'"),
        (["trial.yaml", "--set", "run.step=1"], "did you mean run.steps"),
        (["none.yaml"], "none.yaml does not exist"),
        (["trial.yaml", "trial.yaml"], "two files are named trial"),
        (["trial.yaml", "--stagger", "-1"], "--stagger is -1.0"),
        (["trial.yaml", "--minutes", "0"], "--minutes is 0.0"),
        (["trial.yaml", "--devices", "0", "99"], "--devices names"),
        (["pack", "trial.yaml"], "study pack needs --to FILE.tar.xz"),
        (["pack", "trial.yaml", "--to", "records.tar.xz"], "There is no run in"),
        (["trial.yaml", "other.yaml", "--arms", "middle"], "--arms middle is in no study of this call"),
    ],
)
def test_a_mistake_on_the_command_line(tmp_path, monkeypatch, capsys, words, part):
    (tmp_path / "other.yaml").write_bytes(written(tmp_path).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", *words]) == 2
    assert part in capsys.readouterr().err


# Runs -----------------------------------------------------------------------------------------------------------------


def test_runs_come_arm_by_arm_with_the_arms_own_fields_last(tmp_path):
    path = written(tmp_path)
    study = load_study(path)
    runs = planned_runs(study, path, "big", tmp_path / "out", extra=["training.learning_rate=7", "run.steps=2"])
    assert [(r.arm, r.seed) for r in runs] == [("low", 1), ("low", 2), ("high", 1), ("high", 2)]
    cfg = runs[3].config()
    assert (cfg.training.learning_rate, cfg.run.steps, cfg.run.seed, cfg.run.name) == (1e-3, 2, 2, "high-seed2")
    assert (Path(cfg.run.out_dir), cfg.run.tensorboard, cfg.model.num_hidden_layers) == (tmp_path / "out", False, 1)
    selected = planned_runs(study, path, "cpu", tmp_path, arms=["high"], seeds=[1])
    assert [r.name for r in selected] == ["high-seed1"]


def test_a_shared_start_is_one_for_each_seed_and_no_arm_trains_its_own(tmp_path):
    path = written(tmp_path, start={"set": {"numerics.training_precision": "bf16", "numerics.rollout_precision": "bf16"}})
    study = load_study(path)
    runs = planned_runs(study, path, "cpu", tmp_path / "out")
    assert {(r.seed, r.start.name) for r in runs} == {(1, "start-seed1-hf"), (2, "start-seed2-hf")}
    assert all("training.warm_start.steps=0" in r.overrides for r in runs)
    assert not any(r.ready for r in runs)
    start = start_run(study, path, "cpu", tmp_path / "out", 2).config()
    assert (start.run.seed, start.run.steps, start.numerics.training_precision) == (2, 0, "bf16")


@given(st.dictionaries(st.sampled_from(["a.b", "c.d"]), st.one_of(st.integers(), st.booleans(), st.text(), st.none(), st.floats(-9, 9))))
def test_overrides_carry_any_value(fields):
    for text, (name, value) in zip(as_overrides(fields), fields.items(), strict=True):
        left, _, right = text.partition("=")
        assert (left, yaml.safe_load(right)) == (name, value)
        assert type(yaml.safe_load(right)) is type(value)
        assert "\n" not in text


def test_finished_runs_are_skipped_and_failed_ones_named_while_the_others_go_on(tmp_path):
    """A real process fails before it trains; two runs are finished already."""
    broken = {"task.kind": "file", "task.path": str(tmp_path / "missing.jsonl")}
    path = written(tmp_path, arms={"broken": broken, "low": {}}, pairs=None, expect=None)
    study, said = load_study(path), []
    runs = planned_runs(study, path, "cpu", tmp_path / "out")[1:]
    for run in runs[1:]:
        finished(run, seed=run.seed)
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    outcome = StudyRunner([plan_of(path, tmp_path / "out", runs=runs)], say=said.append, jobs=2).run()
    assert outcome.done == ["low-seed1", "low-seed2"]
    assert set(outcome.failed) == {"broken-seed2"}
    assert "exit code 2: " in outcome.failed["broken-seed2"]
    assert "missing.jsonl" in outcome.failed["broken-seed2"]
    assert "low-seed1: already done" in said
    assert any(text.startswith("broken-seed2 FAILED: ") for text in said)
    assert all(p.read_bytes() == content for p, content in before.items()), "a finished run was touched"


def test_a_folder_with_other_settings_is_refused(tmp_path):
    path = written(tmp_path)
    study, out = load_study(path), tmp_path / "out"
    run = planned_runs(study, path, "cpu", out)[2]
    finished(run, seed=1)
    text = (run.folder / "config.yaml").read_text()
    (run.folder / "config.yaml").write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.002"))
    with pytest.raises(ConfigError, match=r"other settings \(training.learning_rate: 0.002 there, 0.001 in the study\): remove the folder"):
        StudyRunner([plan_of(path, out, runs=[run])], say=print).run()
    with pytest.raises(ConfigError, match="other settings"):
        write_page(study, path, "cpu", out, tmp_path / "docs")


def test_a_moved_folder_or_another_ground_is_not_another_setting(tmp_path):
    path = written(tmp_path)
    study, out = load_study(path), tmp_path / "out"
    run = planned_runs(study, path, "cpu", out)[0]
    finished(run, seed=1)
    cfg = load_config(run.folder / "config.yaml", ["run.backend=cpu", "run.out_dir=elsewhere", "run.resume=true"])
    (run.folder / "config.yaml").write_text(dump_config(cfg))
    outcome = StudyRunner([plan_of(path, out, runs=[run])], say=print).run()
    assert outcome.done == ["low-seed1"]


# Figures and claims -----------------------------------------------------------------------------------------------------


def test_figures_of_a_run(tmp_path):
    history = load_history(write_run(tmp_path / "run", warm_steps=3, rl_steps=17, seed=random.randrange(10**6)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [line["mismatch_kl"] for line in lines if line["phase"] == 1.0]
    expected = {
        "mean": statistics.fmean(values),
        "first": values[0],
        "last": values[-1],
        "max": max(values),
        "tail": statistics.fmean(values[-TAIL:]),
        "gain": values[-1] - values[0],
    }
    for over, value in expected.items():
        # two correctly rounded sums of the same terms, divided once
        assert figure_of(history, Figure(metric="mismatch_kl", over=over)) == pytest.approx(value, rel=1e-15), over
    assert figure_of(history, Figure(metric="reward/held_out", over="last")) == 0.3 + 0.015 * 10
    assert math.isnan(figure_of(history, Figure(metric="kl_ref", over="mean")))


@given(
    st.lists(st.lists(st.one_of(st.integers(-3, 3), st.just(math.nan)), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["<", ">", "="]),
    st.sampled_from(["<", ">", "="]),
)
@settings(max_examples=200)
def test_a_claim_is_judged_by_the_seeds_its_arms_share(rows, one, two):
    claim = parse_claim(f"f: a {one} b {two} 2", arms={"a", "b", "c"}, figures={"f"})
    values = {arm: {seed: float(row[i]) for seed, row in enumerate(rows)} for i, arm in enumerate("abc")}
    found = judge(claim, values)
    shared = [row for row in rows if not math.isnan(row[0]) and not math.isnan(row[1])]
    compare = {"<": lambda x, y: x < y, ">": lambda x, y: x > y, "=": lambda x, y: x == y}
    if not shared:
        assert (found.verdict, found.seeds) == ("not run", 0)
        return
    means = [sum(row[i] for row in shared) / len(shared) for i in (0, 1)]
    agree = [compare[one](row[0], row[1]) and compare[two](row[1], 2) for row in shared]
    assert found.verdict == ("confirmed" if all(agree) else "undecided" if any(agree) else "contradicted")
    assert (found.seeds, found.agreeing) == (len(shared), agree.count(True))
    assert dict(found.means) == {"a": means[0], "b": means[1]}


def test_a_curve_has_the_mean_and_deviation_of_every_step():
    curve = curve_of("arm", [([1, 2], [1.0, 5.0]), ([1, 3], [3.0, 4.0])])
    assert (curve.steps, curve.means) == ([1, 2, 3], [2.0, 5.0, 4.0])
    assert curve.spreads == [pytest.approx(math.sqrt(2)), 0.0, 0.0]
    assert curve_of("arm", []) is None


# Page -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path):
    """A study of which one run of four is missing and one half done, and its page."""
    path = written(tmp_path)
    study, out = load_study(path), tmp_path / "out"
    runs = planned_runs(study, path, "cpu", out)
    for run in runs[:3]:
        finished(run, seed=random.randrange(10**6))
    write_run(runs[3].folder, warm_steps=0, rl_steps=2)
    (runs[3].folder / "config.yaml").write_text(dump_config(runs[3].config()))
    return runs, write_page(study, path, "cpu", out, tmp_path / "docs"), tmp_path


def test_page_states_verdicts_spread_and_what_was_not_run(page):
    runs, path, folder = page
    text = path.read_text()
    assert path == folder / "docs" / "studies" / "trial.md"
    rewards = {}
    for run in runs[:3]:
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        rewards[run.arm, run.seed] = statistics.fmean(line["reward/mean"] for line in lines)
    low = [rewards["low", 1], rewards["low", 2]]
    assert f"| low | 2 | {statistics.fmean(low):.3f} ± {_shown(statistics.stdev(low))} |" in text
    verdict = "confirmed" if rewards["high", 1] > rewards["low", 1] else "contradicted"
    agreeing = int(verdict == "confirmed")
    assert f"- **{verdict}**: `reward: high > low` (hope). high {rewards['high', 1]:.3f}, low {low[0]:.3f}; {agreeing} of 1 seeds" in text
    assert "**contradicted**: `kl: low > 1000` (fear)" in text
    assert "0 of 2 seeds agree" in text
    assert "- high, seed 2: 2 of 4 steps" in text
    assert "No difference has the same sign in every seed, of at least two." in text
    assert "3 of 4 runs complete, 4 RL steps each" in text
    assert str(folder) not in text


def _shown(value: float) -> str:
    """Two digits as the page writes a spread."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{value:.3f}" if value >= 1e-2 else f"{mantissa}e{int(exponent)}"


def test_numbers_and_curves_behind_the_page(page):
    runs, _, folder = page
    text = (folder / "docs" / "evidence" / "cpu" / "studies" / "trial.json").read_text()
    assert str(folder) not in text
    document = json.loads(text)
    assert [(r["arm"], r["seed"]) for r in document["runs"]] == [("low", 1), ("low", 2), ("high", 1)]
    lines = [json.loads(line) for line in (runs[2].folder / "metrics.jsonl").read_text().splitlines()]
    curve = document["runs"][2]["curves"]["reward/mean"]
    assert curve["step"] == [1, 2, 3, 4]
    assert curve["value"] == [float(f"{line['reward/mean']:.6g}") for line in lines]
    assert document["missing"] == {"high-seed2": "2 of 4 steps"}
    image = ElementTree.parse(folder / "docs" / "studies" / "figures" / "trial_reward_mean.svg").getroot()
    assert image.tag.endswith("svg")
    assert len([e for e in image.iter() if e.tag.endswith("polyline")]) == 2


def test_a_difference_with_one_sign_in_every_seed_is_said_in_words(tmp_path):
    path = written(tmp_path)
    study, out = load_study(path), tmp_path / "out"
    for run in planned_runs(study, path, "cpu", out):
        finished(run, seed=run.seed)
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["reward/mean"] += 1.0 if run.arm == "high" else 0.0
            line["mismatch_kl"] = run.seed * (1.0 if run.arm == "high" else 1.5) - 2.0
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_page(study, path, "cpu", out, tmp_path / "docs").read_text()
    assert "- reward of high is higher than that of low in all 2 seeds." in text
    assert "- kl of high is lower than that of low in all 2 seeds." in text
    assert "Nothing: every arm has run with every seed." in text
    # seeds 1 and 2: the differences are -0.5 and -1.0
    assert "-0.750 ± 0.354, negative 2/2" in text


def test_a_page_written_twice_is_the_same(page):
    _, path, folder = page
    before = path.read_text()
    write_page(load_study(folder / "trial.yaml"), folder / "trial.yaml", "cpu", folder / "out", folder / "docs")
    assert path.read_text() == before
