"""An end of the ``nccl`` transport whose peer dies in the middle of an update: what the tests of both devices check."""

import subprocess
import sys
import time
from pathlib import Path

ENDS = ("sender", "receiver")
_SCRIPT = Path(__file__).with_name("broadcast_process.py")


def check_dead_peer(folder: Path, victim: str, message: int, *, devices: dict[str, str], whole_bytes: int, told: str) -> None:
    """The other end says ``told`` within seconds of the death of its peer, which comes before the peer's ``message``-th message."""

    def started(end: str) -> subprocess.Popen[str]:
        words = [str(_SCRIPT), end, str(folder), devices[end], str(whole_bytes), victim, str(message)]
        return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)

    ends = {end: started(end) for end in ENDS}
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
