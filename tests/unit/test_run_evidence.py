"""The runner of evidence jobs: raw output, a header that lets it be repeated, no path of this machine."""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import run_evidence

ROOT = Path(__file__).resolve().parents[2]


def test_jobs_name_files_that_exist():
    jobs = run_evidence.load_jobs()
    assert len({job["command"] for job in jobs.values()}) == len(jobs)
    for name, job in jobs.items():
        assert set(job) == {"gpus", "shows", "command"}, name
        files = [word for word in shlex.split(job["command"]) if word.endswith((".py", ".yaml"))]
        assert all((ROOT / file).is_file() for file in files), (name, files)


EVIDENCE = ROOT / "docs/evidence"


def evidence_patterns() -> list[list[str]]:
    """Of each row of the table the patterns of its first cell; one without a folder is in that of the row's first."""
    found = []
    for row in (EVIDENCE / "README.md").read_text().splitlines():
        cell = row.split("|")[1] if row.startswith("| `") else ""
        named = [word for word in re.findall("`([^`]+)`", cell) if re.search(r"[/*]|\.[a-z]+$", word)]
        if named:
            folder = named[0].rpartition("/")[0]
            found.append([one for word in named for one in braces_expanded(word if "/" in word else f"{folder}/{word}")])
    return found


def braces_expanded(pattern: str) -> list[str]:
    parts = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def test_every_row_of_the_evidence_names_files_and_every_file_is_named():
    rows, named = evidence_patterns(), set[Path]()
    assert len(rows) > 30
    for pattern in itertools.chain.from_iterable(rows):
        hits = sorted(EVIDENCE.glob(pattern))
        assert hits, f"docs/evidence/README.md names {pattern}, which does not exist"
        for hit in hits:
            named |= {hit, *hit.rglob("*")}
    files = {file for file in EVIDENCE.rglob("*") if file.is_file()} - {EVIDENCE / "README.md", EVIDENCE / "jobs.yaml"}
    assert sorted(str(file.relative_to(EVIDENCE)) for file in files - named) == [], "no row of docs/evidence/README.md names these"


def test_output_is_kept_raw_but_for_paths(tmp_path, capsys):
    code = f"import sys, torch; print({str(ROOT / 'a')!r}); print(torch.__file__); print('odd \\t line '); sys.exit(3)"
    assert run_evidence.run_job("job", f"python -c {shlex.quote(code)}", tmp_path) == 3
    text = (tmp_path / "job.log").read_text()
    head, body = text.split("\n\n", 1)
    assert {line.split(":")[0] for line in head.splitlines()} == {
        f"# {k}" for k in ("job", "command", "commit", "versions", "devices", "started")
    }
    assert body.splitlines()[:3] == ["REPO/a", "SITE/torch/__init__.py", "odd \t line "]
    assert "# exit status: 3" in body
    assert str(ROOT) not in body
    assert "job: exit status 3" in capsys.readouterr().out


def test_the_folder_of_the_logs_can_be_named_in_a_command(tmp_path):
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('here')"
    assert run_evidence.run_job("job", f"python -c {shlex.quote(code)} $OUT/file", tmp_path) == 0
    assert (tmp_path / "file").read_text() == "here"


def test_processes_of_a_job_find_the_package_where_it_is_not_installed(tmp_path):
    """Without ``site`` nothing that is installed is found, an editable checkout neither."""
    child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-S', '-c', 'import e2e_fp8'], cwd='/'))"
    assert run_evidence.run_job("job", f"python -c {shlex.quote(child)}", tmp_path) == 0, (tmp_path / "job.log").read_text()


def test_unknown_jobs_are_refused_before_anything_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/run_evidence.py", "--out", str(tmp_path / "out"), "doctor", "nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "unknown job: nonsense" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("together", [False, True])
def test_a_failed_job_is_the_exit_status(together, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run_evidence, "load_jobs", lambda: {n: {"command": f"python -c 'raise SystemExit({s})'"} for n, s in (("a", 0), ("b", 1))}
    )
    arguments = ["--out", str(tmp_path), *(["--together"] if together else [])]
    assert run_evidence.main([*arguments, "a"]) == 0
    assert run_evidence.main([*arguments, "a", "b"]) == 1
    assert {p.name for p in tmp_path.glob("*.log")} == {"a.log", "b.log"}
