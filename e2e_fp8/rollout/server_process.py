"""A vLLM server as a child process: started with a token, watched until healthy, ended with everything it spawned."""

import errno
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, write_token

GUARD = "e2e_fp8.rollout.token_guard.TokenGuard"
EXTENSION = "e2e_fp8.rollout.worker_extension.WorkerExtension"
REMOTE_FLAGS = ("--weight-transfer-config", '{"backend": "e2e_fp8"}', "--worker-extension-cls", EXTENSION, "--middleware", GUARD)
"""What any ``vllm serve`` needs to take weights from a trainer, besides VLLM_SERVER_DEV_MODE=1 and a token."""
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(os.environ.pop("E2E_FP8_PARENT")):
    sys.exit("the trainer is gone")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that the kernel ends with its parent (PR_SET_PDEATHSIG), so that a killed trainer leaves no server behind."""
MOST_RESTARTS = 3
"""How often a server is started again because another process took its port."""
_IN_USE = re.compile(rf"\[Errno {errno.EADDRINUSE}\]|\bEADDRINUSE\b")
"""How Python and torch name a port that cannot be bound; vLLM's ranks meet on one that was free when it was chosen, too."""
_TAIL_BYTES = 64 << 10
_LISTEN = "0A"
"""State of a listening socket in ``/proc/PID/net/tcp``."""
_ERROR = re.compile(r"(\b\w*(?:Error|Exception): .+)$")


def server_flags(args: Mapping[str, Any]) -> list[str]:
    """Command-line flags that mean what ``args``, keyword arguments of ``vllm.LLM``, mean; the transfer engine is the remote one."""
    flags = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if name == "weight_transfer_config":
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    # with the last one, answers say how much of the prompt came from the prefix cache
    return [*flags, *REMOTE_FLAGS, "--enable-prompt-tokens-details"]


class ServerProcess:
    """One server on a loopback port, in a process group of its own."""

    def __init__(
        self, flags: list[str], environ: Mapping[str, str], folder: Path, *, timeout_s: float, first_port: int | None = None
    ) -> None:
        """Start and wait until it answers. ``folder`` receives its log and its token file (mode 0600).

        The port is ``first_port`` or a free one. Where another process takes it, or one of vLLM's own, before the server listens, the
        server is started again on another one, at most ``MOST_RESTARTS`` times; the log says so.

        Raises EngineError, with the cause in the log, when it ends or does not answer within ``timeout_s``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.token = secrets.token_urlsafe(32)
        self.log = folder / "server.log"
        self.log.write_bytes(b"")
        write_token(folder / "server.token", self.token)
        child = {name: value for name, value in environ.items() if name not in (TOKEN_VARIABLE, "VLLM_API_KEY")}
        child |= {
            TOKEN_FILE_VARIABLE: str(folder / "server.token"),
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONUNBUFFERED": "1",
            "E2E_FP8_PARENT": str(os.getpid()),
        }
        port, restarts = first_port or _free_port(), 0
        while not self._answers_on(port, flags, child, timeout_s):
            if not self._lost_its_port() or restarts == MOST_RESTARTS:
                raise EngineError(f"The rollout server ended during start-up (exit code {self._process.returncode}): {self.last_words()}")
            old, port, restarts = port, _free_port(), restarts + 1
            with self.log.open("a") as log:
                log.write(f"e2e_fp8: another process took port {old} or one of vLLM's; restart {restarts} of {MOST_RESTARTS} on {port}\n")

    def _answers_on(self, port: int, flags: list[str], environ: Mapping[str, str], timeout_s: float) -> bool:
        """Start the server and wait until it answers; False when it ended instead. Raises EngineError when neither happens in time."""
        self.url = f"http://127.0.0.1:{port}"
        # The module form: the `vllm` script of CPU builds looks for a package name that they do not have.
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port), *flags]
        self._log_start = self.log.stat().st_size
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TIED, *server],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if self._await_health(port, timeout_s):
                return True
        except BaseException:
            self.close()
            raise
        self.close()
        return False

    def _await_health(self, port: int, timeout_s: float) -> bool:
        client, deadline = ServerClient(self.url, self.token, timeout_s=5.0), time.monotonic() + timeout_s
        # Who listens is looked up first: whoever else has the port must neither be taken for the server nor see its token.
        while not (_listens(self._process.pid, port) and client.is_healthy()):
            if self._process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise EngineError(f"The rollout server did not answer within {timeout_s:g} s of its start; see {self.log}.")
            time.sleep(0.2)
        return True

    def _lost_its_port(self) -> bool:
        """Whether the server ended because an address that it was to listen on was in use."""
        return any(names_a_taken_port(line) for line in self._lines())

    @property
    def pid(self) -> int:
        """Process id of the front end, and id of its process group."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the front end still runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last error in the server's log, in one line, and where the log is."""
        lines, errors = self._lines(), []
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if " WARNING " not in line and (found := _ERROR.search(line)):
                # pydantic tells what is wrong in the line after its error's name
                errors.append(f"{found[1]}: {following.partition(') ')[2].strip()}" if "validation error" in line else found[1])
        told = errors or [line for line in lines if line.strip()] or ["it wrote nothing"]
        # The first error is the cause; what follows it are processes that lost their partner.
        return f"{told[0 if errors else -1].strip()[:400]} (log: {self.log})"

    def _lines(self) -> list[str]:
        """The end of the log of the last start."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()

    def close(self) -> None:
        """End the whole process group: politely first, then for good. Does nothing for a server that is gone."""
        for how, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline and _group_lives(self._process):
                time.sleep(0.05)
        self._process.wait()


def names_a_taken_port(line: str) -> bool:
    """Whether a line of a log says that a port could not be bound because it is in use."""
    return _IN_USE.search(line) is not None


def _group_lives(process: subprocess.Popen) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _listens(pid: int, port: int) -> bool:
    """Whether process ``pid`` itself listens on this IPv4 port."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == _LISTEN}
        return any(os.readlink(fd) in sockets for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
