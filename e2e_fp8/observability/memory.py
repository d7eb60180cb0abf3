"""Memory of processes and of the host, from the kernel's own counters (Linux). Free of torch."""

import os
from collections.abc import Sequence
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
GIB = float(1 << 30)


def resident_gib(pid: int | None = None, proc: Path = PROC) -> float:
    """Resident memory of a process (None: this one), shared pages included; 0 for one that is gone."""
    try:
        pages = int((proc / str(pid or os.getpid()) / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def group_processes(group: int, proc: Path = PROC) -> list[tuple[int, str]]:
    """``(pid, command line)`` of every process of a process group."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # the name in parentheses may hold anything
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if len(fields) > 2 and int(fields[2]) == group:
            found.append((int(folder.name), command))
    return found


def host_used_fraction(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Share of the host's memory in use, or of this cgroup's limit where that is nearer; what the kernel can reclaim counts as free."""
    lines = (line.split(":") for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    kib = {name: int(value.split()[0]) for name, value in lines}
    used = 1.0 - kib["MemAvailable"] / kib["MemTotal"]
    try:
        limit = int((cgroup / "memory.max").read_text())
        current = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # no cgroup v2, or no limit ("max")
        return used
    return max(used, (current - int(stat.get("inactive_file", 0))) / limit)


def imbalance(values: Sequence[float]) -> float | None:
    """Largest over mean, 1 where all are equal; None with fewer than two values or nothing in them."""
    mean = sum(values) / len(values) if len(values) > 1 else 0.0
    return max(values) / mean if mean > 0 else None
