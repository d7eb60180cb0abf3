"""Several studies in one call: what they share, devices, the time limit, arms of a size, packed records."""

import json
import random
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from study_cases import STUDY, finished, plan_of, written
from synthetic_run import write_run

from e2e_fp8.cli import main as cli
from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.load import dump_config
from e2e_fp8.studies.report import write_page
from e2e_fp8.studies.runner import StudyRunner, _Job
from e2e_fp8.studies.runs import Plan, start_run


def two_studies(tmp_path: Path, start: dict | None = None) -> list[Plan]:
    """``trial`` and ``second``, of which ``second``'s arm ``low_again`` is ``trial``'s ``low``."""
    first = written(tmp_path, start=start)
    second = tmp_path / "second.yaml"
    arms = {"low_again": STUDY["arms"]["low"], "middle": {"training.learning_rate": 5.0e-4}}
    fields = {**STUDY, "arms": arms, "pairs": [], "expect": [], **({"start": start} if start is not None else {})}
    second.write_text(yaml.safe_dump(fields, sort_keys=False))
    return [plan_of(path, tmp_path / "out" / path.stem / "cpu") for path in (first, second)]


def test_a_run_that_two_studies_have_in_common_is_run_once(tmp_path):
    plans, said = two_studies(tmp_path), []
    for run in [*plans[0].runs, *plans[1].runs[2:]]:
        finished(run, seed=random.randrange(10**6))
    outcome = StudyRunner(plans, say=said.append, jobs=2).run()
    assert outcome.failed == {}
    assert set(outcome.done) == {f"{plan.name}/{run.name}" for plan in plans for run in plan.runs}
    assert "second/low_again-seed2: the same run as trial/low-seed2" in said
    for index in (0, 1):
        source, copy = plans[0].runs[index].folder, plans[1].runs[index].folder
        assert (copy / "metrics.jsonl").read_bytes() == (source / "metrics.jsonl").read_bytes()
    page = write_page(plans[1].study, plans[1].path, "cpu", plans[1].out, tmp_path / "docs").read_text()
    assert "4 of 4 runs complete" in page
    assert "2 shared with another study that has the same run" in page
    numbers = json.loads((tmp_path / "docs" / "evidence" / "cpu" / "studies" / "second.json").read_text())
    assert [run.get("same_run_as") for run in numbers["runs"]] == ["trial/low-seed1", "trial/low-seed2", None, None]


def test_a_start_that_is_there_serves_every_study_with_the_same_start(tmp_path):
    """Runs that are then started fail, as their start has no weights; what matters is which start they found."""
    start = {"set": {"numerics.training_precision": "bf16", "numerics.rollout_precision": "bf16"}}
    plans = two_studies(tmp_path, start=start)
    made = {}
    for seed in (1, 2):
        run = start_run(plans[0].study, plans[0].path, "cpu", plans[0].out, seed)
        cfg = run.config()
        write_run(run.folder, warm_steps=2, rl_steps=0, seed=seed)
        (run.folder / "config.yaml").write_text(dump_config(cfg))
        weights = run.folder.with_name(f"{run.name}-hf")
        weights.mkdir()
        (weights / "config.json").write_text(json.dumps(to_hf_config(cfg.model, None, eos_token_id=1, pad_token_id=0)))
        made[seed] = (weights / "config.json").read_bytes()
    runner = StudyRunner([Plan(**{**vars(plan), "runs": plan.runs[:2]}) for plan in plans], say=print, minutes=0.1)
    for seed in (1, 2):
        for run in plans[0].runs[:2]:
            if run.seed == seed:
                finished(run, seed=seed)
    outcome = runner.run()
    assert (outcome.failed, outcome.out_of_time) == ({}, False)
    for seed, content in made.items():
        assert (plans[1].out / f"start-seed{seed}-hf" / "config.json").read_bytes() == content
        same = json.loads((plans[1].out / f"start-seed{seed}" / "environment.json").read_text())
        assert same["same_run_as"] == f"trial/start-seed{seed}"
        assert plans[1].runs[seed - 1].done()


def test_studies_with_other_starts_share_no_run(tmp_path):
    plans = two_studies(tmp_path, start={"set": {}})
    other = written(tmp_path, start={"set": {"training.warm_start.steps": 3}})
    plans[0] = plan_of(other, plans[0].out)
    keys = [[job.key for job in StudyRunner([plan], say=print)._starts()] for plan in plans]
    assert not {*keys[0]} & {*keys[1]}


def test_processes_are_dealt_out_over_devices_and_start_one_after_the_other(tmp_path):
    (plan, _), stagger = two_studies(tmp_path), 0.3
    plan.out.mkdir(parents=True)
    runner = StudyRunner([plan], say=print, jobs=4, devices=["3", "5"], stagger_s=stagger)
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time(), flush=True); time.sleep(3)"
    jobs = [_Job(plan=plan, run=run, name=run.name, key=run.name) for run in plan.runs]
    with ThreadPoolExecutor(4) as pool:
        problems = list(pool.map(lambda job: runner._child(job, [sys.executable, "-c", code]), jobs))
    assert problems == [None] * 4
    lines = [(plan.out / f"{job.run.name}.log").read_text().split() for job in jobs]
    assert sorted(device for device, _ in lines) == ["3", "3", "5", "5"]
    starts = sorted(float(when) for _, when in lines)
    # the interpreter's own start varies
    assert starts[-1] - starts[0] > stagger


def test_when_the_minutes_are_over_what_runs_is_stopped_and_the_rest_not_started(tmp_path):
    path = written(tmp_path)
    plan, said = plan_of(path, tmp_path / "out"), []
    finished(plan.runs[0], seed=1)
    before = time.monotonic()
    outcome = StudyRunner([plan], say=said.append, minutes=0.02).run()
    assert time.monotonic() - before < 30
    assert (outcome.out_of_time, outcome.done, outcome.failed) == (True, ["low-seed1"], {})
    assert not (plan.out / "high-seed1.log").exists()


def test_a_size_may_have_some_of_the_arms(tmp_path, capsys):
    sizes = {"cpu": {**STUDY["sizes"]["cpu"], "arms": ["high"]}}
    path = written(tmp_path, sizes=sizes)
    plan = plan_of(path, tmp_path / "out")
    assert [run.name for run in plan.runs] == ["high-seed1", "high-seed2"]
    for run in plan.runs:
        finished(run, seed=run.seed)
    text = write_page(plan.study, path, "cpu", plan.out, tmp_path / "docs").read_text()
    assert "- low: cannot run at this size" in text
    assert "2 of 2 runs complete" in text
    assert cli.main(["study", str(path), "--arms", "low"]) == 2
    assert "--arms low is not in" in capsys.readouterr().err


def test_packed_records_give_the_same_page_elsewhere(tmp_path, capsys, monkeypatch):
    plans = two_studies(tmp_path)
    for plan in plans:
        for run in plan.runs[:3]:
            finished(run, seed=random.randrange(10**6))
            (run.folder / "checkpoints").mkdir()
            (run.folder / "checkpoints" / "weights").write_bytes(b"0" * 100)
    monkeypatch.chdir(tmp_path)
    files = [str(plan.path) for plan in plans]
    assert cli.main(["study", "pack", *files, "--out", "out", "--to", "records.tar.xz"]) == 0
    assert capsys.readouterr().out.startswith("6 runs, ")
    with tarfile.open("records.tar.xz") as archive:
        assert not any("checkpoints" in name for name in archive.getnames())
        archive.extractall("elsewhere", filter="data")
    for out in ("out", "elsewhere"):
        assert cli.main(["study", "report", *files, "--out", out, "--docs", f"docs_{out}"]) == 0
    for plan in plans:
        pages = [Path(f"docs_{out}/studies/{plan.name}.md").read_text() for out in ("out", "elsewhere")]
        assert pages[0] == pages[1]
