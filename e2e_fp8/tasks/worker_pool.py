"""Rewards in parallel processes, each response with a time limit."""

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from e2e_fp8.config.task import TaskConfig
from e2e_fp8.errors import DataError
from e2e_fp8.tasks.reward_worker import read_frame, write_frame
from e2e_fp8.types import Prompt

START_UP_S = 120.0
"""Time for imports and data sets of a worker."""


class _Worker:
    """One process and what it is at work on."""

    def __init__(self, task: TaskConfig) -> None:
        self.index: int | None = None
        """Position of the response; None while idle."""
        self.ready = False
        self.deadline = time.monotonic() + START_UP_S
        # a session of its own: Ctrl-C does not reach it, and killing its group takes along what a reward started
        self.process = subprocess.Popen(
            [sys.executable, "-m", "e2e_fp8.tasks.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.send((sys.path, task.model_dump(mode="json")))

    def send(self, message: Any) -> None:
        # a worker that is already dead shows in its answers
        with suppress(BrokenPipeError):
            write_frame(self.requests, pickle.dumps(message))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with suppress(BrokenPipeError):
            self.requests.close()
        self.answers.close()


class WorkerPool:
    """``task.reward_workers`` processes, started on first use and kept.

    The parts of a response are those its rewards compute, wherever and in whatever order they run; only a time-out depends on
    the clock.
    """

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._workers: list[_Worker] = []

    def score_parts(self, responses: Sequence[tuple[Prompt, str]]) -> list[list[float] | None]:
        """The value of each reward function for each response, in order; None for a response that ran out of time.

        Raises:
            DataError: a reward failed, or a worker died of it (names the prompt), or workers do not start.
        """
        results: list[list[float] | None] = [None] * len(responses)
        waiting = list(range(len(responses)))[::-1]
        open_count = len(responses)
        while len(self._workers) < min(self._task.reward_workers, len(responses)):
            self._workers.append(_Worker(self._task))
        try:
            while open_count:
                self._assign(waiting, responses)
                for worker in self._wait():
                    open_count -= self._take(worker, responses, results)
                for worker in [w for w in self._workers if time.monotonic() > w.deadline]:
                    open_count -= self._expire(worker)
        except BaseException:
            # what is still being computed belongs to a call that is over
            self.close()
            raise
        return results

    def _assign(self, waiting: list[int], responses: Sequence[tuple[Prompt, str]]) -> None:
        for worker in self._workers:
            if worker.ready and worker.index is None and waiting:
                worker.index = waiting.pop()
                prompt, text = responses[worker.index]
                worker.deadline = time.monotonic() + self._task.reward_timeout_s
                worker.send(((prompt.uid, prompt.text, prompt.answer, prompt.metadata), text))

    def _wait(self) -> list[_Worker]:
        """Workers with an answer, or none when the next deadline comes first."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if not worker.ready or worker.index is not None:
                    selector.register(worker.answers, selectors.EVENT_READ, worker)
            deadline = min(w.deadline for w in self._workers)
            return [key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()) + 1e-3)]

    def _take(self, worker: _Worker, responses: Sequence[tuple[Prompt, str]], results: list[list[float] | None]) -> int:
        """Read one answer; 1 when a response is done with it."""
        body = read_frame(worker.answers)
        where = f"the reward of prompt {responses[worker.index][0].uid}" if worker.index is not None else "the start of a reward worker"
        if body is None:
            worker.process.wait()
            raise DataError(
                f"{where} ended its worker process with exit code {worker.process.returncode}; see its output above, fix the reward."
            )
        answer = json.loads(body)
        if "error" in answer:
            raise DataError(answer["error"])
        worker.ready, worker.deadline = True, float("inf")
        if worker.index is None:
            return 0
        results[worker.index], worker.index = answer["value"], None
        return 1

    def _expire(self, worker: _Worker) -> int:
        """Replace a worker whose time is over; 1 when a response is done with it."""
        if not worker.ready:
            raise DataError(f"a reward worker did not start within {START_UP_S:g} s; set task.reward_workers to 0 to see why.")
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._task)
        return 1

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
