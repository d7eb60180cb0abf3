"""Metric sinks, names, timers and the terminal display."""

import contextlib
import importlib.util
import io
import json
import math
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_run import write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e_fp8.errors import StorageError, UserError
from e2e_fp8.observability.history import load_history
from e2e_fp8.observability.metrics import JsonlSink, MultiSink, TensorBoardSink, WandbSink, truncate_jsonl
from e2e_fp8.observability.names import METRICS, PHASES, check_names
from e2e_fp8.observability.progress import Progress, print_summary
from e2e_fp8.observability.timers import PhaseTimer


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_metric_has_a_description_and_no_two_mean_the_same():
    descriptions = [m.description for m in METRICS.values()]
    assert all(len(d) > 5 for d in descriptions)
    assert len({(m.description, m.unit) for m in METRICS.values()}) == len(METRICS)
    assert {f"time/{phase}" for phase in PHASES} <= METRICS.keys()


def test_names_the_stages_emit_are_in_the_table():
    """The real functions, on real numbers: a renamed metric fails here and not after an hour of rollout."""
    import torch

    from e2e_fp8.correction.diagnostics import mismatch_metrics
    from e2e_fp8.numerics.formats import E4M3
    from e2e_fp8.numerics.tile_stats import tile_statistics

    train, rollout = -torch.rand(10), -torch.rand(10)
    check_names(mismatch_metrics(train, rollout, torch.ones(10), torch.tensor([0, 4, 10])))
    tiles = tile_statistics(torch.randn(128, 128), E4M3, "128x128", power_2_scale=False)
    check_names(f"tiles/weights/{name}" for name in tiles)


def test_unknown_name_is_refused_before_anything_is_written(tmp_path):
    first = JsonlSink(tmp_path / "a.jsonl")
    for sink in (first, MultiSink([first])):
        with pytest.raises(ValueError, match="reward/meen"):
            sink.log(1, {"reward/mean": 1.0, "reward/meen": 1.0})
    assert not (tmp_path / "a.jsonl").exists()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_jsonl_numbers_survive_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    sink = JsonlSink(path)
    for step, value in enumerate(values, start=1):
        sink.log(step, {"loss": value})
        assert read(path)[-1] == {"step": step, "loss": value}  # on disk after each step
    assert [r["loss"] for r in read(path)] == values


def test_non_finite_is_null_on_disk_and_a_gap_in_the_history(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0], start=1):
        sink.log(step, {"loss": value})
    assert [r["loss"] for r in read(tmp_path / "metrics.jsonl")] == [1.0, None, None, 2.0]
    assert load_history(tmp_path).series("loss") == ([1, 4], [1.0, 2.0])


@pytest.mark.parametrize("resumed", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo'])
def test_resume_drops_newer_records_and_a_torn_line(tmp_path, resumed, torn):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 6):
        sink.log(step, {"loss": float(step)})
    with open(path, "a") as file:
        file.write(torn)
    again = JsonlSink(path, resume_step=resumed)
    assert path.exists() == (resumed > 0)
    again.log(resumed + 1, {"loss": 0.5})
    assert [r["step"] for r in read(path)] == [*range(1, min(resumed, 5) + 1), resumed + 1]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_refuses_a_damaged_middle(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2"):
        truncate_jsonl(path, 2)
    assert path.read_text() == '{"step": 1}\nnot json\n{"step": 3}\n'


def test_records_survive_kill_9(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from e2e_fp8.observability.metrics import JsonlSink
        sink = JsonlSink(Path(sys.argv[1]))
        for step in range(1, 4):
            sink.log(step, {"loss": step / 3})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m.jsonl")])
    assert result.returncode == -9
    assert read(tmp_path / "m.jsonl") == [{"step": s, "loss": s / 3} for s in range(1, 4)]


def scalars(folder, tag):
    events = EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {e.step: e.value for e in events.Scalars(tag)}


def test_tensorboard_reads_back_and_resume_hides_newer_steps(tmp_path):
    sink = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        sink.log(step, {"reward/mean": step / 4, "phase": 1.0})
    sink.close()
    assert scalars(tmp_path, "reward/mean") == {s: s / 4 for s in range(1, 6)}
    time.sleep(1.1)  # event files of one second share a name
    sink = TensorBoardSink(tmp_path, resume_step=3)
    sink.log(4, {"reward/mean": 9.0})
    sink.close()
    assert scalars(tmp_path, "reward/mean") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 9.0}


def test_wandb_configured_but_not_installed():
    assert importlib.util.find_spec("wandb") is None, "wandb is not in the lock; without it this test would start a run"
    with pytest.raises(UserError, match="install wandb"):
        WandbSink("project", "run", {})


def test_multi_sink_closes_all_even_when_one_fails(tmp_path):
    class Failing:
        def log(self, step, record):
            raise AssertionError

        def close(self):
            raise OSError("disk gone")

    board = TensorBoardSink(tmp_path)
    with pytest.raises(OSError, match="disk gone"):
        MultiSink([Failing(), board]).close()
    assert board._writer.all_writers is None


class Clock:
    """A clock that moves only when told."""

    now = 100.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def test_timer_charges_each_second_to_one_phase():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    clock.advance(50)
    with timer("sync"):
        clock.advance(1)
        with timer("receipt"):
            clock.advance(2)
        clock.advance(4)
    clock.advance(8)
    with timer("rollout"):
        clock.advance(16)
    with contextlib.suppress(KeyError), timer("rollout"):
        clock.advance(32)
        raise KeyError
    assert timer.seconds() == {"rollout": 48.0, "sync": 5.0, "receipt": 2.0}
    assert list(timer.seconds()) == ["rollout", "sync", "receipt"]
    assert timer.metrics() == {"time/rollout": 48.0, "time/sync": 5.0, "time/receipt": 2.0}
    with pytest.raises(ValueError, match="naptime"), timer("naptime"):
        pass


def test_timer_waits_for_queued_work():
    clock = Clock()
    timer = PhaseTimer(synchronize=lambda: clock.advance(3), clock=clock)
    with timer("update"):
        clock.advance(1)
    assert timer.seconds() == {"update": 4.0}


def test_timer_measures_real_time():
    timer = PhaseTimer()
    started = time.perf_counter()
    with timer("eval"):
        time.sleep(0.02)
    assert 0.02 <= timer.seconds()["eval"] <= time.perf_counter() - started


RECORD = {"reward/mean": 0.25, "mismatch_kl": 4.5e-4, "response_length/mean": 7.5, "entropy": 1.2, "time/rollout": 1.5, "time/update": 0.5}


def test_progress_is_one_plain_line_a_step_when_piped():
    code = f"""
        from e2e_fp8.observability.progress import Progress
        with Progress(warm_steps=1, rl_steps=2) as p:
            p.update(1, {{"phase": 0.0, "sft/loss": 2.5}})
            p.note("starting [the] engine")
            p.update(2, {RECORD!r})
            p.update(3, {RECORD | {"reward/held_out": 0.5}!r})
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    warm, note, first, last = result.stdout.splitlines()
    assert warm.startswith("warm start 1/1 | sft loss 2.5 |")
    assert note == "starting [the] engine"
    assert first.startswith("RL step 1/2 | reward 0.25 | mismatch KL 4.5e-4 | length 7.5 | entropy 1.2 | rollout 1.5s update 0.5s | ETA ")
    assert "held-out 0.5" in last
    assert last.endswith("ETA 0.0 s")
    assert "\x1b" not in result.stdout


def test_progress_in_a_terminal_and_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    shown = io.StringIO()
    with Progress(warm_steps=0, rl_steps=4, console=Console(file=shown, force_terminal=True, width=100)) as progress:
        progress.update(1, RECORD | {"reward/held_out": 0.75})
        progress.update(2, RECORD)
    for text in ("RL step 2/4", "held-out", "0.75", "mismatch KL", "rollout", "ETA"):
        assert text in shown.getvalue()
    monkeypatch.setenv("CI", "true")
    assert Progress(warm_steps=0, rl_steps=4, console=Console(file=io.StringIO(), force_terminal=True)).live is None


def test_eta_ignores_warm_start_steps(monkeypatch):
    progress = Progress(warm_steps=2, rl_steps=10, console=Console(file=io.StringIO()))
    now = Clock()
    monkeypatch.setattr("e2e_fp8.observability.progress.time.perf_counter", now)
    progress._step_ends = [now()]
    etas = []
    for step, seconds in enumerate([1, 1, 10, 10, 10], start=1):
        now.advance(seconds)
        etas.append(progress._eta(step))
    assert etas == [1.0, 0.0, 90.0, 80.0, 70.0]


def test_reading_a_run_needs_no_torch():
    code = "import sys; import e2e_fp8.observability.progress, e2e_fp8.observability.report; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_summary_shows_the_figures(tmp_path):
    run = write_run(tmp_path / "r")
    (run / "report.html").write_text("x")
    out = io.StringIO()
    print_summary(run, Console(file=out, width=160))
    text = out.getvalue()
    reward = [r["reward/mean"] for r in read(run / "metrics.jsonl") if "reward/mean" in r]
    kl = [r["mismatch_kl"] for r in read(run / "metrics.jsonl") if "mismatch_kl" in r]
    assert "0.300 → 0.750" in text
    assert f"{sum(reward[:5]) / 5:.3f} → {sum(reward[-5:]) / 5:.3f}" in text
    assert f"{1e4 * sum(kl) / len(kl):.2f}".rstrip("0") + "e-4" in text
    assert "31 passed, 0 failed" in text
    assert str(run / "report.html")[:40] in text
    assert len(text.splitlines()) < 40


def test_full_disk_while_a_record_is_appended_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"Cannot write .*metrics\.jsonl: No space left on device\..*--resume"):
        _sink_at(tmp_path / "metrics.jsonl").log(1, RECORD)


def _sink_at(path):
    """A sink on a device file, which the truncation at construction would replace."""
    sink = JsonlSink(path.with_name("other.jsonl"))
    sink.path = path
    return sink
