"""Words in shared memory between a trainer and engine ranks in processes of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.flags import EngineFlags, TrainerFlags, looks

PROCESS = Path(__file__).with_name("flags_process.py")
RANKS = 2
TAKEN_BACK = "the trainer took its announcement back"
GONE = "the trainer that had announced it is gone"
LATE = "the trainer that had announced it did not come in time"


def started(*words: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, PROCESS, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Ranks:
    """Engine ranks; all are told the same."""

    def __init__(self, description: dict) -> None:
        self.processes = [started("rank", json.dumps(description), rank) for rank in range(RANKS)]
        assert self.answers() == ["open"] * RANKS

    def tell(self, line: str) -> None:
        for process in self.processes:
            print(line, file=process.stdin, flush=True)

    def answers(self) -> list:
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def flags():
    flags = TrainerFlags(RANKS)
    yield flags
    flags.close()


@pytest.fixture(scope="module")
def ranks(flags):
    ranks = Ranks(flags.describe())
    flags.unlink()
    yield ranks
    ranks.close()


def await_ready(flags: TrainerFlags) -> None:
    assert any(flags.are_ready() for _ in looks(30))


def test_every_rank_begins_at_the_word_and_is_seen_to_end(flags, ranks):
    for soon in (False, True):
        turn = flags.arm()
        assert not flags.has_ready()
        ranks.tell(f"wait {turn} 60")
        await_ready(flags)
        if soon:
            flags.soon()
        assert flags.go()
        assert ranks.answers() == [""] * RANKS
        assert not flags.all_done()
        ranks.tell(f"done {turn}")
        assert ranks.answers() == [None] * RANKS
        assert flags.all_done()
        assert not flags.has_failed()
        assert not flags.cancel(), "what has begun cannot be taken back"


@pytest.mark.parametrize("times", [0, 1, 3])
def test_ranks_prepare_once_before_the_word(flags, ranks, times):
    turn = flags.arm()
    ranks.tell(f"wait {turn} 60 soon")
    await_ready(flags)
    for _ in range(times):
        flags.soon()
        time.sleep(0.3)
    assert flags.go()
    assert ranks.answers() == [["", min(times, 1)]] * RANKS


def test_one_failed_rank_is_seen(flags, ranks):
    turn = flags.arm()
    ranks.tell(f"wait {turn} 60")
    await_ready(flags)
    assert flags.go()
    ranks.answers()
    print(f"failed {turn}", file=ranks.processes[1].stdin, flush=True)
    assert json.loads(ranks.processes[1].stdout.readline()) is None
    assert flags.has_failed()
    assert not flags.all_done()


@pytest.mark.parametrize("waits_before", [True, False])
def test_a_cancelled_turn_begins_nowhere(flags, ranks, waits_before):
    """Also for ranks that come to it afterwards, or when another has begun."""
    turn = flags.arm()
    if waits_before:
        ranks.tell(f"wait {turn} 60")
        await_ready(flags)
    assert flags.cancel()
    assert not flags.go()
    if not waits_before:
        ranks.tell(f"wait {turn} 60")
    assert ranks.answers() == [TAKEN_BACK] * RANKS
    assert flags.arm() == turn + 1
    ranks.tell(f"wait {turn} 60")
    assert ranks.answers() == [TAKEN_BACK] * RANKS
    assert not flags.has_ready(), "what ranks said of another turn does not count"


def test_patience_ends_for_all_ranks_or_for_none(flags, ranks):
    """The trainer's word falls into the moment in which the ranks give it up; whoever is first decides for all."""
    for _ in range(60):
        turn, patience_s = flags.arm(), random.uniform(0.005, 0.02)
        ranks.tell(f"wait {turn} {patience_s}")
        await_ready(flags)
        time.sleep(max(0.0, patience_s + random.uniform(-0.004, 0.002)))
        went = flags.go()
        assert ranks.answers() == [("" if went else LATE)] * RANKS
    ranks.tell(f"wait {flags.arm()} 0.01")
    assert ranks.answers() == [LATE] * RANKS
    assert not flags.go()


@pytest.mark.parametrize("forks", [(), ("forks",)])
def test_a_killed_trainer_is_noticed(forks):
    """Also when a forked child of it, which has all of its descriptors, lives on."""
    trainer = started("trainer", RANKS, *forks)
    assert trainer.stdout is not None
    ranks = Ranks(json.loads(trainer.stdout.readline()))
    child = int(trainer.stdout.readline()) if forks else None
    turn = int(trainer.stdout.readline())
    try:
        ranks.tell(f"wait {turn} 60")
        time.sleep(0.3)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        killed = time.monotonic()
        assert ranks.answers() == [GONE] * RANKS
        assert time.monotonic() < killed + 10
        if child is not None:
            os.kill(child, 0)
    finally:
        trainer.kill()
        if child is not None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        ranks.close()
        trainer.communicate()


def test_nothing_stays_behind_and_strangers_cannot_open():
    flags = TrainerFlags(RANKS)
    description = flags.describe()
    with pytest.raises(EngineError, match="has flags for 2 engine ranks, and this is rank 2"):
        EngineFlags(description, 2)
    for path in ("/etc/passwd", "/dev/shm/other"):
        with pytest.raises(EngineError, match="no buffer of this program"):
            EngineFlags(description | {"path": path}, 0)
    for missing in description:
        with pytest.raises(EngineError, match="described its flags in no way"):
            EngineFlags({key: value for key, value in description.items() if key != missing}, 0)
    assert Path(description["path"]).stat().st_mode & 0o777 == 0o600
    flags.unlink()
    assert not Path(description["path"]).exists()
    with pytest.raises(EngineError, match=r"cannot be opened .* on one host only"):
        EngineFlags(description, 0)
    flags.close()
