"""One process that forks the ranks of every job of several ranks."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rank_cases import SCRIPT, Case, free_port, rank_environment, write_case


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """``run_job(case)``: exit statuses of the ranks, and their folder."""
    root, count = tmp_path_factory.mktemp("ranks"), itertools.count()
    with (root / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=rank_environment()
        )

        def run(case: Case) -> tuple[list[int], Path]:
            assert server.stdin is not None
            assert server.stdout is not None
            out = root / str(next(count))
            write_case(case, out)
            server.stdin.write(f"{case.world} {free_port()} {out}\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, (root / "log").read_text()[-3000:]
            return json.loads(answer), out

        yield run
        server.stdin.close()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def results(run_job):
    """``results(case)``: the folder of that job, run once."""
    done: dict[str, Path] = {}

    def get(case: Case) -> Path:
        key = json.dumps([case.world, case.config, case.steps, case.more])
        if key not in done:
            statuses, done[key] = run_job(case)
            messages = [f.read_text() for pattern in ("failed-*", "refused-*") for f in done[key].glob(pattern)]
            assert statuses == [0] * len(statuses), "\n".join(messages)
        return done[key]

    return get
