"""Files by which processes of a test tell each other something once."""

import time
from pathlib import Path


def leave_note(path: Path, text: str) -> None:
    """Make the file, whole from the moment it is there."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def await_note(path: Path, timeout_s: float = 240) -> str:
    """What the file says, once it is there."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path.read_text()
