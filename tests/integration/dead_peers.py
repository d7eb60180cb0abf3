"""An end of the ``nccl`` transport whose peer dies in the middle of an update: what the tests of both devices check."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integration.gpus import places

ENDS = ("sender", "receiver")
_SCRIPT = Path(__file__).with_name("broadcast_process.py")


def check_dead_peer(
    folder: Path, victim: str, message: int, *, on_gpus: bool = False, hosts: bool = False, whole_bytes: int, told: str
) -> None:
    """The other end says ``told`` within seconds of the death of its peer, which comes before the peer's ``message``-th message."""
    own = dict(zip(ENDS, places(len(ENDS), hosts=hosts), strict=True))

    def started(end: str) -> subprocess.Popen[str]:
        device = f"cuda:{own[end].gpu}" if on_gpus else "cpu"
        words = [str(_SCRIPT), end, str(folder), device, str(whole_bytes), victim, str(message)]
        return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, env=os.environ | own[end].environ)

    ends = {end: started(end) for end in ENDS}
    dead = ends.pop(victim)
    (left,) = ends.values()
    try:
        _, said = dead.communicate(timeout=120)
        assert dead.returncode == -9, said
        (folder / "dead").touch()
        began = time.monotonic()
        _, said = left.communicate(timeout=90)
        assert left.returncode == 2, said
        assert told in said
        assert time.monotonic() - began < 20, said
    finally:
        left.kill()
        dead.kill()
