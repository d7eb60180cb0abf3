"""The runs of a study: which there are, what state each is in, and one process for each that is not done.

A run's folder holds the state: a run is done once its metrics have the last RL step, so nothing else can go stale.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e_fp8.config.load import load_config, parse_config, read_yaml
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError, writing
from e2e_fp8.observability.history import flatten, read_records
from e2e_fp8.studies.schema import Study, arm_config, arm_overrides, as_overrides, base_of

_MODULE = "e2e_fp8.cli"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    base: Path
    overrides: tuple[str, ...]
    start: Path | None
    """Hugging Face folder of the seed's shared start; None without one."""

    @property
    def name(self) -> str:
        """``arm-seedN``, the run's folder."""
        return self.folder.name

    def config(self) -> Config:
        """Configuration of the run. Raises ConfigError, also when its start is not there yet."""
        return load_config(self.base, self.overrides)

    def done(self) -> bool:
        """Whether the folder holds every RL step."""
        return steps_done(self.folder) >= self.config().run.steps

    @property
    def ready(self) -> bool:
        """Whether the weights that it starts from are there."""
        return self.start is None or self.start.is_dir()


def planned_runs(
    study: Study, path: Path, size: str, out: Path, *, extra: Sequence[str] = (), arms: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[PlannedRun]:
    """Every run, all seeds of an arm before the next arm; ``arms`` and ``seeds`` select some.

    Raises:
        ConfigError: an arm or seed that the study does not have.
    """
    for kind, wanted, known in (("--arms", arms, list(study.arms)), ("--seeds", seeds, list(study.seeds))):
        unknown = [item for item in wanted if item not in known]
        if unknown:
            raise ConfigError(f"{kind} {unknown[0]} is not in {path}: it has {', '.join(map(str, known))}.")
    return [
        _planned(study, path, size, out, arm, seed, list(extra))
        for arm in study.arms
        if arm in (arms or study.arms)
        for seed in study.seeds
        if seed in (seeds or study.seeds)
    ]


def _planned(study: Study, path: Path, size: str, out: Path, arm: str, seed: int, extra: list[str]) -> PlannedRun:
    start = out / f"start-seed{seed}-hf" if study.start else None
    common = arm_overrides(study, size, arm, extra)
    common += as_overrides({"run.name": f"{arm}-seed{seed}", "run.out_dir": str(out), "run.seed": seed})
    if start:
        common += as_overrides({"model.hf_path": str(start), "training.warm_start.steps": 0})
    folder = out / f"{arm}-seed{seed}"
    return PlannedRun(arm=arm, seed=seed, folder=folder, base=base_of(study, path, size), overrides=tuple(common), start=start)


def start_run(study: Study, path: Path, size: str, out: Path, seed: int, extra: Sequence[str] = ()) -> PlannedRun:
    """The run that makes the shared start of a seed: the warm start of the base configuration alone."""
    assert study.start is not None
    name = f"start-seed{seed}"
    settings = {**study.start.set, "run.steps": 0, "run.eval_interval": 0, "run.checkpoint_interval": 1}
    settings |= {"run.name": name, "run.out_dir": str(out), "run.seed": seed}
    texts = [*as_overrides(study.sizes[size].set), *as_overrides(study.set), *extra, *as_overrides(settings)]
    return PlannedRun(arm="start", seed=seed, folder=out / name, base=base_of(study, path, size), overrides=tuple(texts), start=None)


def steps_done(folder: Path) -> int:
    """RL steps that the run logged; 0 when there is no run."""
    return sum(record.get("phase") == 1.0 for record in read_records(folder)) if folder.is_dir() else 0


def check_same_settings(run: PlannedRun) -> None:
    """Refuse a folder that holds a run of other settings.

    Raises:
        ConfigError: names the run and the first fields that differ.
    """
    if not (run.folder / "config.yaml").exists():
        return
    found, wanted = (_settings(cfg) for cfg in (stored_config(run), run.config()))
    different = [name for name in wanted if found.get(name) != wanted[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({name}: {found.get(name)} there, {wanted[name]} in the study"
            f"{f', and {len(different) - 1} more' if len(different) > 1 else ''}): remove the folder or choose another --out."
        )


def stored_config(run: PlannedRun) -> Config:
    """The configuration in a run's folder, at its own shared start: the folder may have moved, and its path may be relative."""
    path = run.folder / "config.yaml"
    values = read_yaml(path)
    if run.start:
        values["model"] = {**values.get("model", {}), "hf_path": str(run.start)}
    return parse_config(values, where=str(path))


def _settings(cfg: Config) -> dict[str, str]:
    """What the numbers of a run depend on, by dotted name."""
    document = cfg.model_dump(mode="json")
    for name in ("resume", "out_dir", "backend", "tensorboard", "wandb_project", "threads", "checkpoint_interval", "keep_checkpoints"):
        document["run"].pop(name)
    return flatten(document)


@dataclass(kw_only=True)
class Outcome:
    """How the runs of one call ended."""

    done: list[str]
    failed: dict[str, str]
    """Run -> why, one sentence."""


class StudyRunner:
    """Starts the runs as processes of ``e2e-fp8 train``; a failed one is named and the others go on."""

    def __init__(self, study: Study, path: Path, size: str, out: Path, *, extra: Sequence[str], say: Callable[[str], None]) -> None:
        self.study, self.path, self.size, self.out, self.extra, self.say = study, path, size, out, list(extra), say
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, runs: Sequence[PlannedRun], jobs: int) -> Outcome:
        """Make the shared starts, then run whatever is not done, ``jobs`` processes at a time.

        Raises:
            ConfigError: a run folder holds other settings.
            KeyboardInterrupt: after Ctrl-C, once every child has written its checkpoint.
        """
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        outcome = Outcome(done=[], failed={})
        pool = ThreadPoolExecutor(jobs)
        try:
            starts = {run.seed: run.start for run in runs if run.start}
            self._collect({f"start-seed{seed}": pool.submit(self._make_start, seed, folder) for seed, folder in starts.items()}, outcome)
            outcome.done.clear()
            ready = [run for run in runs if run.ready]
            for run in ready:
                check_same_settings(run)
            self._collect({run.name: pool.submit(self._run_one, run) for run in ready}, outcome)
            outcome.failed |= {run.name: "the shared start of its seed failed" for run in runs if not run.ready}
        except KeyboardInterrupt:
            self._stop_children()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return outcome

    def _collect(self, jobs: Mapping[str, "Future[str | None]"], outcome: Outcome) -> None:
        for name, job in jobs.items():
            problem = job.result()
            if problem is None:
                outcome.done.append(name)
            else:
                outcome.failed[name] = problem
                self.say(f"{name} FAILED: {problem}")

    def _make_start(self, seed: int, folder: Path) -> str | None:
        """Train the warm start of one seed and export its weights in BF16."""
        run = start_run(self.study, self.path, self.size, self.out, seed, self.extra)
        check_same_settings(run)
        if folder.is_dir():
            return None
        problem = self._child(run.name, _train_command(run.base, run.overrides, resume=_exists(run.folder)))
        if problem is None:
            partial = self.out / f".{folder.name}-{os.getpid()}"
            command = [sys.executable, "-m", _MODULE, "export", str(run.folder), "--out", str(partial), "--precision", "bf16"]
            problem = self._child(run.name, command)
            if problem is None:
                with writing(folder):
                    partial.rename(folder)
                self.say(f"{run.name}: done")
        return problem

    def _run_one(self, run: PlannedRun) -> str | None:
        if run.done():
            self.say(f"{run.name}: already done")
            return None
        before = time.perf_counter()
        problem = self._child(run.name, _train_command(run.base, run.overrides, resume=_exists(run.folder)))
        if problem is None and not run.done():
            problem = f"it ended with {steps_done(run.folder)} RL steps; {self.out / run.name}.log says why"
        if problem is None:
            self.say(f"{run.name}: done in {time.perf_counter() - before:.0f} s")
        return problem

    def _child(self, name: str, command: Sequence[str]) -> str | None:
        """Run one process with its output in ``name.log``; None when it ended with 0, else its last line."""
        log = self.out / f"{name}.log"
        with self._lock:
            if self._stopping:
                return "not started: the study was interrupted"
            with writing(log), open(log, "ab") as file:
                # A session of its own: Ctrl-C reaches it once, from here, and it stops at a step boundary.
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self._children.add(child)
        code = child.wait()
        with self._lock:
            self._children.discard(child)
        return None if code == 0 else f"exit code {code}: {_last_line(log)}"

    def _stop_children(self) -> None:
        with self._lock:
            self._stopping = True
            children = list(self._children)
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()


def _exists(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


def _train_command(base: Path, overrides: Sequence[str], *, resume: bool) -> list[str]:
    command = [sys.executable, "-m", _MODULE, "train", str(base)]
    for text in overrides:
        command += ["--set", text]
    return [*command, "--resume"] if resume else command


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def check_arms(study: Study, path: Path, size: str, extra: Sequence[str]) -> None:
    """Parse every arm with the command's own overrides, before anything starts. Raises ConfigError naming the arm."""
    for arm in study.arms:
        arm_config(study, path, size, arm, list(extra))
