"""A real HTTP server that answers as a test says."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SERVER = Path(__file__).with_name("judge_server.py")


@contextmanager
def answering(*modes: str) -> Iterator[tuple[str, Path]]:
    """URL of a process that answers its n-th request as the n-th mode of judge_server.py, and the file of requests it saw."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        process = subprocess.Popen([sys.executable, str(SERVER), str(log), *modes], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", log
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
