"""Errors a user can act on. The CLI prints the message alone and exits with 2; anything else is a bug and keeps its traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """One clear sentence or two: what, where, why, what to do."""


class ConfigError(UserError):
    """A field or a combination of fields is wrong."""


class DataError(UserError):
    """A data set, prompt or reward is unusable."""


class CheckpointError(UserError):
    """A checkpoint is missing, truncated or does not fit, or could not be written."""


class EngineError(UserError):
    """The rollout engine died, hangs, or refuses what was asked."""


class RankError(UserError):
    """A rank of the trainer ended, or cannot be reached."""


class LayoutError(UserError):
    """The bytes of one side cannot be laid out, or cannot pass, as the other side needs them."""


class ByteMismatchError(UserError):
    """The receipt failed: names the tensors whose bytes differ between trainer and engine."""


class StorageError(UserError):
    """A file of the run cannot be written: disk full, quota, permissions."""


def first_line(error: BaseException) -> str:
    """What a library's error says, short enough to stand in a sentence: up to 200 characters of its first line."""
    return str(error).strip().partition("\n")[0][:200]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses inside the block into a StorageError that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"Cannot write {path}: {reason}. Free space or choose another run.out_dir, then continue with --resume."
        ) from error
