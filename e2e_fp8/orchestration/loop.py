"""The loop, synchronous, driven by one process; a trainer of several ranks looks like one engine to it (``orchestration.ranks``).

    task prompts -> VllmEngine.generate -> verifier -> advantages (of the group, or GAE with a critic)
         ^                                                   |
         |                                                   v
    VllmEngine <- receipt <- weight sync <- MegatronEngine.train_step <- TIS weights <- old log-probs

A step ends with the engine on the new weights, so staleness is 0 and the mismatch is numerics alone. State between steps is
the trainer's state, the step number, a curriculum's levels and calibrated clip ranges: prompts, sampling seeds and learning rate are
functions of those.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, ConfigError, RankError, StorageError, UserError
from e2e_fp8.observability.health import HealthWatch
from e2e_fp8.observability.history import read_records
from e2e_fp8.observability.metrics import truncate_jsonl
from e2e_fp8.observability.progress import Progress, print_summary
from e2e_fp8.observability.report import write_report
from e2e_fp8.observability.timers import PhaseTimer
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.environment import describe_environment
from e2e_fp8.orchestration.evaluate import example_record, held_out_metrics
from e2e_fp8.orchestration.metrics_sink import open_sink
from e2e_fp8.orchestration.receipts import RECEIPTS, ReceiptLog
from e2e_fp8.orchestration.rl_step import StepOutcome, run_step
from e2e_fp8.orchestration.run_folder import RunFolder, load_run_config
from e2e_fp8.orchestration.session import Session, open_session
from e2e_fp8.orchestration.shadow_pass import ClipState
from e2e_fp8.orchestration.warm_start import warm_start
from e2e_fp8.orchestration.weight_sync import SyncReport

_STEP_LOGS = (RECEIPTS, "samples.jsonl", "evaluations.jsonl")


class Interrupted(KeyboardInterrupt):
    """Raised between steps after Ctrl-C, once the checkpoint is written."""


class StepAbandoned(KeyboardInterrupt):
    """A stop was asked for while the step had not touched the weights yet. No Exception, which asyncio would keep to itself."""


class StopFlag:
    """Ctrl-C or SIGTERM asks for a stop at the next step boundary; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._may_abandon = False
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._may_abandon:
            raise StepAbandoned

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Under torchrun a stop ends the block at once with StepAbandoned: torchrun kills its ranks 30 seconds after the signal, and
        a rollout may take longer. Elsewhere the block is finished."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            yield
            return
        self._may_abandon = True
        try:
            if self.requested:
                raise StepAbandoned
            yield
        finally:
            self._may_abandon = False

    def restore(self) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Run:
    """One run from start or resume to the report."""

    def __init__(self, cfg: Config) -> None:
        self.folder = RunFolder(cfg)
        self.started = time.perf_counter()
        self.session: Session = open_session(cfg, self.folder.model_dir, drives_ranks=True)
        self.cfg = self.session.cfg
        self.store = CheckpointStore(self.folder.checkpoints, keep=cfg.run.keep_checkpoints)
        self.receipts = ReceiptLog(self.folder.root)
        self.global_step = 0
        """Warm-start steps and RL steps done so far, in one count."""
        self.seconds_before = 0.0
        if cfg.run.resume:
            self._check_resumable()
        if cfg.run.resume and self.store.steps():
            self._resume()
        else:
            # a run that ended before its first checkpoint starts over in its own folder
            self._rewind(-1)
            self.folder.write_inputs(self.cfg, describe_environment())
        self.sink = open_sink(self.cfg, self.folder.root, self.global_step)
        self.progress = Progress(warm_steps=self.warm_steps, rl_steps=self.cfg.run.steps)
        self.health = HealthWatch(self.cfg.health, read_records(self.folder.root))
        self.stop = StopFlag()
        self.checkpoint_seconds: float | None = None
        """Duration of a checkpoint not yet logged: it is written after its step's record, so the next record carries it."""
        self.boundary_versions = self._versions()
        """At the last step boundary; a failure later in a step is saved only if the weights are still those."""
        self.boundary_curriculum = self._curriculum_state()
        """Levels at the last step boundary, which a failed step may have moved."""
        self.session.on_lost_rank(self.report)

    @property
    def warm_steps(self) -> int:
        """Supervised steps before RL."""
        return self.cfg.training.warm_start.steps

    @property
    def _has_critic(self) -> bool:
        return self.cfg.objective.advantage == "gae"

    def _versions(self) -> tuple[int, int]:
        """Optimizer steps of policy and critic so far."""
        session = self.session
        return session.trainer.policy_version, session.critic.policy_version if session.critic is not None else 0

    def _resume(self) -> None:
        state = self.store.load_latest()
        self.global_step = int(state["global_step"])
        self.session.restore(state, self.store, self.global_step)
        self.seconds_before = float(state["seconds"])
        if self.session.task.curriculum is not None:
            self.session.task.curriculum.load_state_dict(state["curriculum"])
        if "clip_state" in state:
            self.session.clip_state = ClipState.from_state_dict(state["clip_state"])
        if self._has_critic and self.global_step > self.warm_steps:
            if "critic" not in state:
                raise ConfigError(
                    f"objective.advantage is gae, but the checkpoint of step {self.global_step} has no critic: restore objective.advantage "
                    "to resume, or choose another run.name."
                )
            self.session.make_critic(state["critic"])
        self._rewind(self.global_step)

    def _rewind(self, step: int) -> None:
        """Forget what an earlier session logged after ``step``."""
        for name in _STEP_LOGS:
            truncate_jsonl(self.folder.root / name, step)
        self.receipts.rewind(step)

    def _check_resumable(self) -> None:
        """Raises ConfigError when the state of the run would mean something else under the given configuration."""
        old = load_run_config(self.folder.root)
        for field, before, now in (
            ("model", old.model, self.cfg.model),
            ("numerics", old.numerics.ungated, self.cfg.numerics.ungated),
            ("task", old.task, self.cfg.task),
            ("training.parallel", old.training.parallel, self.cfg.training.parallel),
            ("training.warm_start", old.training.warm_start, self.cfg.training.warm_start),
            ("run.seed", old.run.seed, self.cfg.run.seed),
            ("run.backend", old.run.backend, self.cfg.run.backend),
        ):
            if before != now:
                raise ConfigError(f"{field} differs from {self.folder.root}/config.yaml; restore it to resume, or choose another run.name.")

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def log(self, record: dict[str, float]) -> None:
        """Count the step, write its record, and save or stop if it is time to."""
        self.global_step += 1
        record["time"] = self._seconds()
        self.sink.log(self.global_step, record)
        self.progress.update(self.global_step, record)
        for alarm in self.health.observe(self.global_step, record):
            self.progress.note(f"ALARM {alarm}")
        self.boundary_versions = self._versions()
        self.boundary_curriculum = self._curriculum_state()

    def _curriculum_state(self) -> dict[str, Any] | None:
        curriculum = self.session.task.curriculum
        return None if curriculum is None else curriculum.state_dict()

    def checkpoint(self) -> None:
        """Write the state after the current step, once."""
        if self.global_step in self.store.steps():
            return
        started = time.perf_counter()
        state: dict[str, Any] = self.session.state_dict() | {
            "global_step": self.global_step,
            "seconds": self._seconds(),
            "clip_state": self.session.clip_state.state_dict(),
        }
        if self.boundary_curriculum is not None:
            state["curriculum"] = self.boundary_curriculum
        self.store.save(self.global_step, state, self.session.write_shares)
        self.checkpoint_seconds = time.perf_counter() - started
        self.receipts.keep(self.store.steps())

    def stop_if_asked(self) -> None:
        """Between steps: honour Ctrl-C with a checkpoint."""
        if self.stop.requested:
            self.checkpoint()
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"stopped after step {self.global_step}; continue with --resume")

    def _on_warm_step(self, step: int, record: dict[str, float]) -> None:
        self.log(record)
        self.stop_if_asked()

    def execute(self) -> None:
        """Warm start, then RL, with evaluation and checkpoints.

        Raises:
            Interrupted: a stop was asked for; the steps done are saved.
        """
        try:
            self._execute()
        except StepAbandoned:
            if self.global_step:
                self.checkpoint()
            raise self._interrupted() from None

    def _execute(self) -> None:
        warm_start(self.session, self.global_step, self._on_warm_step)
        if self.cfg.objective.kl_coef > 0 and self.session.reference is None:
            self.session.make_reference()
        if self._has_critic and self.session.critic is None:
            self.session.make_critic(None)
        first = self.global_step - self.warm_steps
        self.progress.note("starting the rollout engine")
        with self.stop.abandoning():
            self.session.start_rollout()
        self._record_sync(self.session.sync().settled(), self.global_step)
        if first == 0 and self.cfg.run.eval_interval:
            self._log_start()
        for step in range(first, self.cfg.run.steps):
            self._rl_step(step)
            self.stop_if_asked()
        if self.cfg.run.checkpoint_interval:
            self.checkpoint()

    def _log_start(self) -> None:
        metrics = held_out_metrics(self.session, self.cfg.run.eval_samples)
        self.folder.append("evaluations.jsonl", {"step": self.global_step} | metrics)
        self.progress.note(f"held-out reward before RL: {metrics['reward/held_out']:.3f}")

    def _rl_step(self, step: int) -> None:
        timer = PhaseTimer()
        last = step + 1 == self.cfg.run.steps
        evaluated = self._due(self.cfg.run.eval_interval, step, last)
        outcome = run_step(self.session, step, timer, self.stop.abandoning(), census=evaluated)
        if self.checkpoint_seconds is not None:
            outcome.record["time/checkpoint"] = self.checkpoint_seconds
            self.checkpoint_seconds = None
        self._record_sync(outcome.sync, self.global_step + 1)
        if evaluated:
            self._evaluate(outcome, timer)
        self.log(outcome.record)
        if self._due(self.cfg.run.checkpoint_interval, step, last):
            self.checkpoint()

    @staticmethod
    def _due(interval: int, step: int, last: bool) -> bool:
        return interval > 0 and (last or (step + 1) % interval == 0)

    def _evaluate(self, outcome: StepOutcome, timer: PhaseTimer) -> None:
        with timer("eval"):
            metrics = held_out_metrics(self.session, self.cfg.run.eval_samples)
        outcome.record.update(metrics)
        outcome.record["time/eval"] = timer.seconds()["eval"]
        step = self.global_step + 1
        self.folder.append("evaluations.jsonl", {"step": step} | metrics)
        for sample in outcome.samples[:4]:
            self.folder.append("samples.jsonl", {"step": step} | example_record(sample.prompt, sample, sample.reward))

    def _record_sync(self, sync: SyncReport, step: int) -> None:
        self.receipts.record(sync, step)
        if step in self.store.steps():
            # A resumed run syncs again at the step of its checkpoint.
            self.receipts.keep(self.store.steps())

    def save_after(self, error: UserError) -> None:
        """Keep the steps done so far when one fails before it changed the weights."""
        same_weights = self._versions() == self.boundary_versions and self.session.reaches_ranks
        if same_weights and self.global_step and not isinstance(error, CheckpointError | StorageError | RankError):
            self.checkpoint()

    def fail(self, error: BaseException) -> None:
        """Save what can be, and end other ranks that wait for this one."""
        if isinstance(error, UserError):
            self.save_after(error)
        self.session.part(error)
        if not self.session.reaches_ranks:
            # the launcher kills this rank soon, and closing an engine takes its time
            self.report()

    def report(self) -> None:
        """Write the report of what there is; a report that cannot be written must not hide why the run ended."""
        try:
            if (self.folder.root / "metrics.jsonl").exists():
                write_report(self.folder.root)
        except UserError as error:
            self.progress.note(str(error))

    def close(self) -> None:
        """Release the engine, sinks and signal handlers."""
        self.stop.restore()
        try:
            self.receipts.keep(self.store.steps())
        except UserError as error:
            # It must not hide why the run ended.
            self.progress.note(str(error))
        self.progress.close()
        self.sink.close()
        self.session.close()


def train(cfg: Config) -> Path:
    """Run or resume; returns the run folder, which then holds ``report.html``."""
    run = Run(cfg)
    try:
        run.execute()
    except BaseException as error:
        run.fail(error)
        raise
    finally:
        run.close()
        run.report()
    print_summary(run.folder.root)
    return run.folder.root
