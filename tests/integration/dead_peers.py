"""An end of the ``nccl`` transport whose peer dies in the middle of an update: what the tests of both devices check."""

import subprocess
import sys
import time
from pathlib import Path

ENDS = ("sender", "receiver")
_SCRIPT = Path(__file__).with_name("broadcast_process.py")


def check_dead_peer(folder: Path, victim: str, *, devices: dict[str, str], whole_bytes: int, told: str) -> None:
    """The other end says ``told`` within seconds of its peer's death."""
    words = [sys.executable, str(_SCRIPT)]
    ends = {
        end: subprocess.Popen([*words, end, str(folder), devices[end], str(whole_bytes), victim], stderr=subprocess.PIPE, text=True)
        for end in ENDS
    }
    dead = ends.pop(victim)
    (left,) = ends.values()
    try:
        _, own = dead.communicate(timeout=120)
        assert dead.returncode == -9, own
        (folder / "dead").touch()
        began = time.monotonic()
        _, said = left.communicate(timeout=90)
        assert left.returncode == 2, said
        assert told in said
        assert time.monotonic() - began < 20, said
    finally:
        left.kill()
        dead.kill()
