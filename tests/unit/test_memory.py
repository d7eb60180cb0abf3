"""Memory counters against processes whose size is known."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e_fp8.observability.memory import group_processes, host_used_fraction, imbalance, resident_gib
from e2e_fp8.observability.names import METRICS
from e2e_fp8.orchestration.memory_probe import server_memory

GROUP = """
import os, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", f"kept = bytes([1]) * ({mib} << 20); print(flush=True); import time; time.sleep(60)"])
            for mib in (100, 300)]
time.sleep(60)
"""


def test_a_process_group_is_found_and_weighed_whole():
    process = subprocess.Popen([sys.executable, "-c", GROUP], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        members = group_processes(process.pid)
        assert len(members) == 3
        sizes = sorted(resident_gib(pid) * 1024 for pid, _ in members)
        # 300 and 100 MiB of data and an interpreter each, which is below 90 MiB
        assert sizes[0] < 90
        assert 100 <= sizes[1] < 190
        assert 300 <= sizes[2] < 390
        record = server_memory(process.pid)
        assert record["memory/engine_host_gib"] * 1024 == pytest.approx(sum(sizes), abs=5)
        assert record.keys() <= METRICS.keys()
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    deadline = time.monotonic() + 10
    while group_processes(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server_memory(process.pid) == {"memory/engine_host_gib": 0.0}
    assert resident_gib(process.pid) == 0.0


def test_ranks_of_a_server_are_told_by_their_title(tmp_path):
    pages = (1 << 20) // os.sysconf("SC_PAGE_SIZE")
    for pid, group, title, mib in ((7, 5, "VLLM::Worker_TP0", 100), (8, 5, "VLLM::Worker_TP1", 300), (9, 5, "python", 900), (4, 6, "x", 1)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a ) b) S 1 {group} 1 0")
        (folder / "cmdline").write_bytes(title.encode() + b"\0")
        (folder / "statm").write_text(f"99999 {mib * pages} 0")
    members = group_processes(5, tmp_path)
    assert sorted(members) == [(7, "VLLM::Worker_TP0"), (8, "VLLM::Worker_TP1"), (9, "python")]
    workers = [resident_gib(pid, tmp_path) for pid, title in sorted(members) if title.startswith("VLLM::Worker")]
    assert workers == [100 / 1024, 300 / 1024]
    assert imbalance(workers) == 1.5


@pytest.mark.parametrize(
    ("limit", "current", "expected"), [("max", 10**9, 0.75), (str(1000), 900, 0.8), (str(4000), 900, 0.75), (None, 0, 0.75)]
)
def test_host_memory_is_that_of_the_nearer_limit(tmp_path: Path, limit, current, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 400 kB\nMemFree: 1 kB\nMemAvailable: 100 kB\nHugePages_Total: 0\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100\n")
    assert host_used_fraction(tmp_path, tmp_path) == expected


def test_the_real_host():
    assert 0 < host_used_fraction() < 1
    assert 0 < resident_gib() < 1024


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=9), st.floats(0.01, 100))
def test_imbalance_has_no_unit_and_is_one_for_equal_ranks(values, factor):
    assert imbalance([values[0]] * len(values)) == pytest.approx(1.0)
    assert imbalance([v * factor for v in values]) == pytest.approx(imbalance(values))
    assert imbalance(values) >= 1 - 1e-12
    assert imbalance(values[:1]) is None
    assert imbalance([0.0, 0.0]) is None
