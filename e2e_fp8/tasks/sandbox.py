"""Untrusted Python programs, run one at a time in a locked-down process.

With ``isolation="namespaces"`` a program has a time limit, a CPU limit, an address-space limit, no network, no view of other
processes, no file but the interpreter's and the system libraries', and one writable folder of bounded size; everything it started
is dead when the call returns. It is still one kernel: this is not a virtual machine. With ``isolation="limits"`` there are the
limits alone: network and files are open to the program.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from e2e_fp8.errors import UserError

_CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxError(UserError):
    """The system refuses the isolation that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0
    """Wall-clock time; CPU time is bounded by the same number, rounded up."""
    memory_mib: int = 512
    """Address space of each process, the interpreter's own few MiB included."""
    output_kib: int = 64
    """Largest file, standard output included; a program that writes more is ended by SIGXFSZ or an error."""
    folder_mib: int = 16
    """Size of the writable folder (namespaces)."""
    processes: int = 16
    """Processes and threads (namespaces)."""


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How a program ended."""

    exit_code: int
    """128 + signal where one ended it."""
    timed_out: bool
    stdout: str
    """Invalid UTF-8 replaced."""
    stderr: str


def run_program(
    source: str, *, stdin: str = "", limits: Limits | None = None, isolation: Literal["namespaces", "limits"] = "namespaces"
) -> SandboxResult:
    """Run ``source`` as a Python program of the running interpreter's version, with the standard library alone.

    Raises:
        SandboxError: the system refuses namespaces; nothing was run.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="e2e-fp8-sandbox-") as scratch, tempfile.TemporaryDirectory(prefix="e2e-fp8-io-") as streams:
        paths = {name: Path(streams) / name for name in ("program", "stdin", "stdout", "stderr")}
        paths["program"].write_text(source, encoding="utf-8", errors="replace")
        paths["stdin"].write_text(stdin, encoding="utf-8", errors="replace")
        with (
            open(paths["program"], "rb") as program,
            open(paths["stdin"], "rb") as given,
            open(paths["stdout"], "wb") as out,
            open(paths["stderr"], "wb") as err,
        ):
            exit_code, timed_out = _run(program, given, out, err, scratch, limits, isolation)
        return SandboxResult(
            exit_code=exit_code,
            timed_out=timed_out,
            stdout=paths["stdout"].read_text(encoding="utf-8", errors="replace"),
            stderr=paths["stderr"].read_text(encoding="utf-8", errors="replace"),
        )


def _run(
    program: IO[bytes], given: IO[bytes], out: IO[bytes], err: IO[bytes], scratch: str, limits: Limits, isolation: str
) -> tuple[int, bool]:
    """Exit code and whether the time ran out."""
    status_read, status_write = os.pipe()
    python = os.path.realpath(sys.executable)
    job = {
        "namespaces": isolation == "namespaces",
        "program_fd": program.fileno(),
        "status_fd": status_write,
        "scratch": scratch,
        "python": python,
        "interpreter_home": os.path.realpath(sys.base_prefix),
        "folder_mib": limits.folder_mib,
        "limits": _resource_limits(limits, isolation),
    }
    try:
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(_CHILD), json.dumps(job)],
            stdin=given,
            stdout=out,
            stderr=err,
            pass_fds=(program.fileno(), status_write),
            start_new_session=True,
            env={},
        )
    finally:
        os.close(status_write)
    deadline, timed_out = time.monotonic() + limits.seconds, False
    try:
        exit_code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        exit_code, timed_out = 128 + signal.SIGKILL, True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = os.read(status_read, 4096).decode(errors="replace")
        os.close(status_read)
    if not timed_out and status != "ready":
        raise SandboxError(
            f"the code sandbox cannot be set up on this machine ({status or 'no answer'}): allow user namespaces (Linux 5.12 or later), or "
            "set task.code.isolation to limits, which leaves network and files open to the code of the policy."
        )
    return exit_code, timed_out


def _resource_limits(limits: Limits, isolation: str) -> dict[str, int]:
    values = {
        "RLIMIT_AS": limits.memory_mib << 20,
        "RLIMIT_CPU": max(1, int(-(-limits.seconds // 1))),
        "RLIMIT_FSIZE": limits.output_kib << 10,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 64,
    }
    # outside a user namespace the count includes every process of the user
    return values | ({"RLIMIT_NPROC": limits.processes} if isolation == "namespaces" else {})
