"""Words in shared memory by which a trainer tells engine ranks of its host when to begin an announced update, and they that it is over.

A process that sleeps until a message comes wakes after about a millisecond, as long as an H200 takes to copy two gigabytes; one that looks
at a word sees it change at once. The trainer's life is a lock that its kernel drops with it: unlike a process id it is never used again,
and unlike a ``flock`` no forked child keeps it.
"""

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.shared_buffers import checked_path, new_path, open_block

# What the trainer's word says in a turn.
ARMED, SOON, GO, CANCELLED, TRAINER_DIED, TOO_LATE = 1, 2, 3, 4, 5, 6
_STAYS_OFF = {
    CANCELLED: "the trainer took its announcement back",
    TRAINER_DIED: "the trainer that had announced it is gone",
    TOO_LATE: "the trainer that had announced it did not come in time",
}
# What a rank's word says.
READY, DONE, FAILED = 1, 2, 3

_WORD = 8
_ALIVE, _DECISION = 0, 1
"""Bytes of the file that are locked: as long as the trainer lives; while somebody decides what becomes of ``ARMED`` or ``SOON``."""
_LOOK_S = 2e-5
"""Sleep between two looks. The kernel adds about 50 us."""
_EARLY_LOOK_S = 2e-4
"""The same before the trainer has said ``SOON``, which it does half a millisecond before ``GO``."""
_LIFE_S = 0.05
"""Between two looks at whether the trainer lives."""
_HOT_S = 0.02
"""How long a rank looks without sleeping once the trainer has said ``SOON``, and the trainer while ranks write."""


class TrainerFlags:
    """The trainer's end, one at a time for each server: its own word and one of each engine rank, all of them with the number of a turn."""

    def __init__(self, ranks: int) -> None:
        """``ranks``: those of the engine."""
        self.id = secrets.token_hex(8)
        self._path, self._ranks, self._turn = new_path(), ranks, 0
        self._file, self._map = open_block(self._path, os.O_CREAT | os.O_EXCL, (1 + ranks) * _WORD)
        self._words = memoryview(self._map).cast("Q")
        # The lock goes with the first descriptor of this file that the process closes: this one and the map's are closed together.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _ALIVE)
        self._own_threads = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """JSON values from which :class:`EngineFlags` opens the same words."""
        return {"id": self.id, "path": str(self._path), "ranks": self._ranks}

    def unlink(self) -> None:
        """Remove the name once every rank has the words open, so that nothing stays behind when a process is killed."""
        self._path.unlink(missing_ok=True)

    def arm(self) -> int:
        """Begin a turn; its number."""
        self._turn += 1
        self._words[0] = _word(self._turn, ARMED)
        return self._turn

    def soon(self) -> None:
        """Have the ranks look without sleeping."""
        self._turn_into(SOON)

    def go(self) -> bool:
        """Let every rank begin; False, and none ever does in this turn, when they have given the trainer up or it has cancelled."""
        return self._turn_into(GO)

    def cancel(self) -> bool:
        """Have no rank begin; False when they have been told to."""
        self._turn_into(CANCELLED)
        return self._order() != GO

    def are_ready(self) -> bool:
        """Whether every rank waits for the word."""
        return all(state == READY for state in self._states())

    def has_ready(self) -> bool:
        """Whether some rank does."""
        return READY in self._states()

    def has_failed(self) -> bool:
        """Whether some rank began to write and will not end."""
        return FAILED in self._states()

    def all_done(self) -> bool:
        """Whether every rank has written everything."""
        return all(state == DONE for state in self._states())

    def close(self) -> None:
        """Let go of the memory and the lock: the trainer counts as gone."""
        self.unlink()
        self._words.release()
        self._map.close()
        os.close(self._file)

    def _states(self) -> list[int]:
        """Of each rank in this turn, 0 while it has said nothing."""
        return [_said(word, self._turn) for word in self._words[1:]]

    def _order(self) -> int:
        return _said(self._words[0], self._turn)

    def _turn_into(self, order: int) -> bool:
        with self._own_threads, _decision(self._file):
            undecided = self._order() in (ARMED, SOON)
            if undecided:
                self._words[0] = _word(self._turn, order)
        return undecided


class EngineFlags:
    """An engine rank's end."""

    def __init__(self, description: dict[str, Any], rank: int) -> None:
        """Raises EngineError for words that cannot be reached from this host."""
        try:
            ranks, self.id = int(description["ranks"]), str(description["id"])
            path = checked_path(str(description["path"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"The trainer described its flags in no way that this program knows ({error!r}); refused.") from error
        if not 0 <= rank < ranks:
            raise EngineError(f"The trainer has flags for {ranks} engine ranks, and this is rank {rank}; refused.")
        try:
            self._file, self._map = open_block(path, 0, (1 + ranks) * _WORD)
        except (OSError, ValueError) as error:
            raise EngineError(f"The trainer's flags cannot be opened ({error}): an update is announced ahead on one host only.") from error
        self._words, self._rank = memoryview(self._map).cast("Q"), rank

    def wait(self, turn: int, patience_s: float, soon: Callable[[], object] = lambda: None) -> str:
        """Say ``READY``, then wait for the trainer's word: empty for go, otherwise why nothing is to be written; all ranks get the same.

        No longer than ``patience_s`` and than the trainer lives. ``soon`` is called once the trainer has said that its word comes soon.
        """
        self._tell(turn, READY)
        deadline, next_look, hot_until = time.monotonic() + patience_s, 0.0, None
        while True:
            order = _said(self._words[0], turn) or CANCELLED
            if order == GO:
                return ""
            if order in _STAYS_OFF:
                return _STAYS_OFF[order]
            now = time.monotonic()
            if order == SOON and hot_until is None:
                soon()
                hot_until = time.monotonic() + _HOT_S
            if now > deadline:
                self._give_up(turn, TOO_LATE)
            elif now > next_look:
                next_look = now + _LIFE_S
                if not self._trainer_lives():
                    self._give_up(turn, TRAINER_DIED)
            if hot_until is None:
                time.sleep(_EARLY_LOOK_S)
            elif now > hot_until:
                time.sleep(_LOOK_S)

    def done(self, turn: int) -> None:
        """This rank has written everything."""
        self._tell(turn, DONE)

    def failed(self, turn: int) -> None:
        """This rank has begun to write and will not end."""
        self._tell(turn, FAILED)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._file)

    def _tell(self, turn: int, state: int) -> None:
        self._words[1 + self._rank] = _word(turn, state)

    def _give_up(self, turn: int, why: int) -> None:
        """For all ranks, unless the trainer has decided meanwhile."""
        with _decision(self._file):
            if _said(self._words[0], turn) in (ARMED, SOON):
                self._words[0] = _word(turn, why)

    def _trainer_lives(self) -> bool:
        try:
            # shared, so that two ranks that look at once do not take each other for the trainer
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _ALIVE)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _ALIVE)
        return False


def looks(timeout_s: float) -> Iterator[None]:
    """Look again and again: for a while without sleeping, though never without letting other threads run; ends after ``timeout_s``."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < timeout_s:
        yield
        time.sleep(0.0 if waited < _HOT_S else _LOOK_S)


@contextmanager
def _decision(file: int) -> Iterator[None]:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, _DECISION)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _DECISION)


def _word(turn: int, value: int) -> int:
    return turn << 8 | value


def _said(word: int, turn: int) -> int:
    """What ``word`` says in ``turn``; 0 when it is of another."""
    return word & 0xFF if word >> 8 == turn else 0
