"""Runs of one or several studies as processes of ``e2e-fp8 train``: starts first, then whatever is not done, several at a time.

Studies of one call share what is the same: a start of equal settings is trained once, and so is a run that differs from another
study's in its name alone; the others get a copy, with the original's name in its environment.json.
"""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from e2e_fp8.config.load import read_yaml
from e2e_fp8.errors import writing
from e2e_fp8.studies.runs import Plan, PlannedRun, check_same_settings, start_run, steps_done

_MODULE = "e2e_fp8.cli"
_GRACE_S = 45.0
"""Time that runs have for their step and checkpoint when ``minutes`` are over."""
RECORDS = ("environment.json", "metrics.jsonl", "receipts.jsonl", "evaluations.jsonl", "samples.jsonl")
"""What a run leaves besides its configuration, weights and report."""


@dataclass(kw_only=True)
class Outcome:
    """How the runs of one call ended. Names are ARM-seedN, with STUDY/ before it where a call has several studies."""

    done: list[str]
    failed: dict[str, str]
    """Run -> why, one sentence."""
    out_of_time: bool = False
    """``minutes`` were over; what is neither done nor failed was interrupted or not started."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A run, or a start, of a plan."""

    plan: Plan
    run: PlannedRun
    name: str
    key: object
    """Equal for two jobs that differ in nothing but their names."""


class StudyRunner:
    """Starts the runs as processes; a failed one is named and the others go on.

    Args:
        plans: Studies in the order in which their runs start.
        say: Receives one line for each run that ends.
        jobs: Processes at a time.
        devices: Values of CUDA_VISIBLE_DEVICES, dealt out in turn; none leaves the variable alone.
        stagger_s: Seconds between the starts of two processes.
        minutes: After these nothing is started and what runs is stopped; None for no limit.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        say: Callable[[str], None],
        jobs: int = 1,
        devices: Sequence[str] = (),
        stagger_s: float = 0.0,
        minutes: float | None = None,
    ) -> None:
        self.plans, self.say, self.jobs, self.stagger_s = plans, say, jobs, stagger_s
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._devices: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for index in range(jobs):
            self._devices.put(devices[index % len(devices)] if devices else None)
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._next_start = time.monotonic()

    def run(self) -> Outcome:
        """Make the shared starts, then run whatever is not done.

        Raises:
            ConfigError: a run folder holds other settings.
            KeyboardInterrupt: after Ctrl-C, once every child has written its checkpoint.
        """
        for plan in self.plans:
            with writing(plan.out):
                plan.out.mkdir(parents=True, exist_ok=True)
        outcome = Outcome(done=[], failed={})
        pool = ThreadPoolExecutor(self.jobs)
        try:
            starts = self._starts()
            self._collect(self._submit(pool, starts, self._make_starts), outcome)
            outcome.done.clear()
            ready = self._ready_runs(starts, outcome)
            self._collect(self._submit(pool, ready, self._run_group), outcome)
        except TimeoutError:
            self._stop_children(_GRACE_S)
            pool.shutdown(cancel_futures=True)
            outcome.out_of_time = True
            outcome.done = [self._name(plan, run) for plan in self.plans for run in plan.runs if run.ready and run.done()]
        except KeyboardInterrupt:
            self._stop_children(None)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return outcome

    def _name(self, plan: Plan, run: PlannedRun) -> str:
        return run.name if len(self.plans) == 1 else f"{plan.name}/{run.name}"

    def _starts(self) -> list[_Job]:
        """One for each seed of each study that has shared starts."""
        jobs = []
        for plan in self.plans:
            for seed in sorted({run.seed for run in plan.runs if run.start}):
                run = start_run(plan.study, plan.path, plan.size, plan.out, seed, plan.extra)
                check_same_settings(run)
                jobs.append(_Job(plan=plan, run=run, name=self._name(plan, run), key=run.key))
        return jobs

    def _ready_runs(self, starts: Sequence[_Job], outcome: Outcome) -> list[_Job]:
        """Runs whose start is there; the others are added to the failed ones."""
        start_of = {(job.plan.out, job.run.seed): job.key for job in starts}
        ready = []
        for plan in self.plans:
            for run in plan.runs:
                name = self._name(plan, run)
                if not run.ready:
                    outcome.failed[name] = "the shared start of its seed failed"
                    continue
                check_same_settings(run)
                key = (run.key, start_of.get((plan.out, run.seed)))
                ready.append(_Job(plan=plan, run=run, name=name, key=key))
        return ready

    def _submit(
        self, pool: ThreadPoolExecutor, jobs: Sequence[_Job], work: Callable[[list[_Job]], str | None]
    ) -> list[tuple[list[_Job], "Future[str | None]"]]:
        """``work`` on each group of jobs that differ in their names alone."""
        groups: dict[object, list[_Job]] = {}
        for job in jobs:
            groups.setdefault(job.key, []).append(job)
        return [(group, pool.submit(work, group)) for group in groups.values()]

    def _collect(self, submitted: Sequence[tuple[list[_Job], "Future[str | None]"]], outcome: Outcome) -> None:
        """Raises TimeoutError when the minutes are over."""
        for group, future in submitted:
            problem = future.result(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
            for job in group:
                if problem is None:
                    outcome.done.append(job.name)
                else:
                    outcome.failed[job.name] = problem
                    self.say(f"{job.name} FAILED: {problem}")

    # Starts ----------------------------------------------------------------------------------------------------------

    def _make_starts(self, group: list[_Job]) -> str | None:
        """Train the warm start of the first, unless one of them is there, and give all the others a copy."""
        source = next((job for job in group if _weights(job).is_dir()), None)
        if source is None:
            source = group[0]
            problem = self._make_start(source)
            if problem is not None:
                return problem
        for job in group:
            if not _weights(job).is_dir():
                if not _exists(job.run.folder):
                    _copy_records(source, job)
                _copy_folder(_weights(source), _weights(job))
        return None

    def _make_start(self, job: _Job) -> str | None:
        """Train the warm start of one seed and export its weights in BF16."""
        run, folder = job.run, _weights(job)
        problem = self._child(job, _train_command(run.base, run.overrides, resume=_exists(run.folder)))
        if problem is None:
            partial = folder.with_name(f".{folder.name}-{os.getpid()}")
            command = [sys.executable, "-m", _MODULE, "export", str(run.folder), "--out", str(partial), "--precision", "bf16"]
            problem = self._child(job, command)
            if problem is None:
                with writing(folder):
                    partial.rename(folder)
                self.say(f"{job.name}: done")
        return problem

    # Runs ------------------------------------------------------------------------------------------------------------

    def _run_group(self, group: list[_Job]) -> str | None:
        """Run the first, or take one that is done; the others get a copy unless they have begun on their own."""
        source = next((job for job in group if job.run.done()), group[0])
        problem = self._run_one(source)
        if problem is not None:
            return problem
        for job in group:
            if job is not source and not _exists(job.run.folder):
                _copy_records(source, job)
                self.say(f"{job.name}: the same run as {source.plan.name}/{source.run.name}")
            elif job is not source:
                problem = self._run_one(job) or problem
        return problem

    def _run_one(self, job: _Job) -> str | None:
        run = job.run
        if run.done():
            self.say(f"{job.name}: already done")
            return None
        before = time.perf_counter()
        problem = self._child(job, _train_command(run.base, run.overrides, resume=_exists(run.folder)))
        if problem is None and not run.done():
            problem = f"it ended with {steps_done(run.folder)} RL steps; {_log(job)} says why"
        if problem is None:
            self.say(f"{job.name}: done in {time.perf_counter() - before:.0f} s")
        return problem

    # Processes -------------------------------------------------------------------------------------------------------

    def _child(self, job: _Job, command: Sequence[str]) -> str | None:
        """Run one process with its output in the run's log; None when it ended with 0, else its last line."""
        device = self._devices.get()
        try:
            self._wait_for_turn()
            code = self._run_process(command, _log(job), device)
        finally:
            self._devices.put(device)
        return (
            "not started: the study was interrupted"
            if code is None
            else None
            if code == 0
            else f"exit code {code}: {_last_line(_log(job))}"
        )

    def _wait_for_turn(self) -> None:
        """Until ``stagger_s`` after the process before; at once when the study stops."""
        with self._lock:
            turn = max(time.monotonic(), self._next_start)
            self._next_start = turn + self.stagger_s
        self._stopping.wait(max(0.0, turn - time.monotonic()))

    def _run_process(self, command: Sequence[str], log: Path, device: str | None) -> int | None:
        """Exit code; None when the study had stopped before it could start."""
        environ = os.environ | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
        with self._lock:
            if self._stopping.is_set():
                return None
            with writing(log), open(log, "ab") as file:
                # A session of its own: Ctrl-C reaches it once, from here, and it stops at a step boundary.
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environ
                )
            self._children.add(child)
        code = child.wait()
        with self._lock:
            self._children.discard(child)
        return code

    def _stop_children(self, grace_s: float | None) -> None:
        """Ask all to stop after their step; end those that have not within ``grace_s``, None for ever."""
        self._stopping.set()
        with self._lock:
            children = list(self._children)
        for child in children:
            child.send_signal(signal.SIGTERM)
        end = None if grace_s is None else time.monotonic() + grace_s
        for child in children:
            try:
                child.wait(None if end is None else max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


def _weights(start: _Job) -> Path:
    """The exported weights of a start."""
    return start.run.folder.with_name(f"{start.run.name}-hf")


def _log(job: _Job) -> Path:
    return job.plan.out / f"{job.run.name}.log"


def _exists(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def _copy_folder(source: Path, target: Path) -> None:
    """Whole or not at all."""
    partial = target.with_name(f".{target.name}-{os.getpid()}")
    with writing(target):
        shutil.copytree(source, partial)
        partial.rename(target)


def _copy_records(source: _Job, target: _Job) -> None:
    """What ``source`` left, as the folder of ``target``, which has the same settings."""
    values = read_yaml(source.run.folder / "config.yaml")
    values["run"] |= {"name": target.run.name, "out_dir": str(target.plan.out)}
    if target.run.start:
        values["model"]["hf_path"] = str(target.run.start)
    partial = target.run.folder.with_name(f".{target.run.name}-{os.getpid()}")
    with writing(target.run.folder):
        partial.mkdir()
        for name in RECORDS:
            if (source.run.folder / name).exists():
                shutil.copyfile(source.run.folder / name, partial / name)
        environment = partial / "environment.json"
        same = {"same_run_as": f"{source.plan.name}/{source.run.name}"}
        environment.write_text(json.dumps(json.loads(environment.read_text()) | same, indent=2) + "\n")
        (partial / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        partial.rename(target.run.folder)


def _train_command(base: Path, overrides: Sequence[str], *, resume: bool) -> list[str]:
    command = [sys.executable, "-m", _MODULE, "train", str(base)]
    for text in overrides:
        command += ["--set", text]
    return [*command, "--resume"] if resume else command


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"
