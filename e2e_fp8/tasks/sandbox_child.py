"""Runs one Python program under limits; started by :mod:`e2e_fp8.tasks.sandbox` as a script of a fresh, isolated interpreter.

Three processes: this one, waiting; the first process of a new PID namespace, whose end ends every process in it; the program.
The program sees a root folder of its own, made of the interpreter, system libraries and one small writable folder, and a network
without interfaces. It runs without capabilities: they are lost when a user that is not root executes a program.

Standard library alone, as nothing else is importable here.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_INNER_UID = 1000

libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())
    _checked(result, f"mount {target}")


def _die_with_parent() -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _enter_namespaces() -> None:
    """New user, mount, PID, network, IPC and host-name namespaces for the children of this process."""
    uid, gid = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_INNER_UID} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{_INNER_UID} {gid} 1")


def _build_root(scratch: str, interpreter_home: str, folder_mib: int) -> None:
    """Make ``scratch`` the root folder: interpreter and system libraries read-only, ``/tmp`` writable and of bounded size."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("none", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in dict.fromkeys((*_SYSTEM, interpreter_home)):
        if os.path.isdir(folder) and not os.path.exists(scratch + folder):
            os.makedirs(scratch + folder)
            _mount(folder, scratch + folder, None, _MS_BIND | _MS_REC)
    os.mkdir(scratch + "/dev")
    for device in _DEVICES:
        Path(scratch + device).touch()
        _mount(device, scratch + device, None, _MS_BIND)
    os.mkdir(scratch + "/proc")
    _mount("proc", scratch + "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    os.mkdir(scratch + "/tmp")
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_RDONLY)
    result = libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, scratch.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(result, "mount_setattr")
    _mount("none", scratch + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={folder_mib}m,mode=755")
    os.chroot(scratch)
    os.chdir("/tmp")


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _execute(job: dict, folder: str) -> NoReturn:
    """Become the program."""
    os.chdir(folder)
    program = os.path.join(folder, "program.py")
    with open(job["program_fd"], "rb") as source, open(program, "wb") as target:
        shutil.copyfileobj(source, target)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _set_limits(job["limits"])
    os.write(job["status_fd"], b"ready")
    os.close(job["status_fd"])
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    os.execve(job["python"], [job["python"], "-I", "-S", "-B", program], environment)


def _wait(pid: int) -> int:
    """Exit code of a child, 128 + signal where one ended it; other children of the namespace are reaped on the way."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _inside(job: dict) -> int:
    """First process of the namespaces."""
    _die_with_parent()
    _build_root(job["scratch"], job["interpreter_home"], job["folder_mib"])
    pid = os.fork()
    if pid == 0:
        _execute(job, "/tmp")
    os.close(job["status_fd"])
    return _wait(pid)


def main() -> int:
    """Set up what the job asks for, or say on the status pipe what the system refuses."""
    job = json.loads(sys.argv[1])
    _die_with_parent()
    try:
        if not job["namespaces"]:
            _execute(job, job["scratch"])
        _enter_namespaces()
        pid = os.fork()
        if pid == 0:
            os._exit(_guarded(job))
        os.close(job["status_fd"])
        return _wait(pid)
    except OSError as error:
        os.write(job["status_fd"], str(error).encode())
        return 1


def _guarded(job: dict) -> int:
    try:
        return _inside(job)
    except OSError as error:
        os.write(job["status_fd"], str(error).encode())
        return 1


if __name__ == "__main__":
    sys.exit(main())
