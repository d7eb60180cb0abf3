"""Hostile programs against the sandbox, and unit-test rewards; real processes throughout."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from e2e_fp8.config.task import CodeConfig
from e2e_fp8.tasks.code_reward import code_of, code_reward
from e2e_fp8.tasks.sandbox import Limits, SandboxError, run_program
from e2e_fp8.types import Prompt

QUICK = Limits(seconds=20.0, memory_mib=256)
"""Time enough for a loaded machine; what must run out of time has limits of its own."""


def _out(source: str, **given) -> str:
    result = run_program(source, limits=QUICK, **given)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def test_a_harmless_program_runs_with_its_input_and_the_standard_library() -> None:
    assert _out("import json, math, sys\nprint(json.dumps([math.comb(6, 3), sys.stdin.read()]))", stdin="hé\n") == '[20, "h\\u00e9\\n"]'
    failed = run_program("raise SystemExit(7)", limits=QUICK)
    assert (failed.exit_code, failed.timed_out) == (7, False)
    assert "ZeroDivisionError" in run_program("1/0", limits=QUICK).stderr


def test_time_runs_out_for_loops_sleeps_and_ignored_signals() -> None:
    for source in (
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nfor s in (15, 2, 1, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    ):
        started = time.monotonic()
        result = run_program(source, limits=Limits(seconds=0.7))
        assert result.timed_out or result.exit_code == 128 + 9
        assert time.monotonic() - started < 5


def test_memory_is_bounded() -> None:
    result = run_program("x = bytearray(300 << 20)", limits=QUICK)
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr
    assert run_program("x = bytearray(100 << 20)", limits=QUICK).exit_code == 0


def test_output_and_files_are_bounded() -> None:
    result = run_program("while True: print('x' * 1000)", limits=QUICK)
    assert result.exit_code != 0
    assert len(result.stdout) <= QUICK.output_kib << 10
    fill = "import os\nfor i in range(4000):\n    os.write(os.open(f'f{i % 50}_{i}', os.O_CREAT | os.O_WRONLY), b'x' * 60000)"
    assert run_program(fill, limits=QUICK).exit_code != 0


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        source = f"import socket\ntry:\n    {connect}\nexcept OSError as e:\n    print('refused', e.errno)"
        assert _out(source).startswith("refused")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert _out("import socket; print([name for _, name in socket.if_nameindex()])") == "['lo']"


def test_files_outside_the_folder_are_neither_written_nor_there(tmp_path: Path) -> None:
    secret = tmp_path / "answers.txt"
    secret.write_text("42")
    tries = [str(tmp_path / "x"), "/x", "/usr/x", "/dev/x", "/proc/x", str(Path.home() / "x"), str(Path(sys.base_prefix) / "x")]
    source = f"""
import os
for path in {tries!r}:
    try:
        open(path, 'w')
        print('written', path)
    except OSError:
        pass
print(os.path.exists({str(secret)!r}), sorted(os.listdir('/tmp')))
open('mine', 'w').write('ok')
print(open('/tmp/mine').read())
"""
    assert _out(source).splitlines() == ["False ['program.py']", "ok"]
    assert not [path for path in tries if os.path.exists(path)]


def test_the_program_has_no_privilege_and_sees_no_other_process() -> None:
    source = """
import os, ctypes
status = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)
print(int(status['CapEff'], 16), int(status['NoNewPrivs']), sorted(p for p in os.listdir('/proc') if p.isdigit()))
print(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None), sorted(os.environ))
"""
    first, second = _out(source).splitlines()
    assert first.startswith("0 1 ")
    assert len(eval(first.split(" ", 2)[2])) <= 2
    assert second.startswith("-1 ")
    assert "PYTHONPATH" not in second


def test_what_a_program_leaves_behind_is_dead(tmp_path: Path) -> None:
    mark = f"leftover-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(300)', {mark!r}])
    os._exit(0)
time.sleep(0.3)
"""
    result = run_program(source, limits=QUICK)
    assert result.exit_code == 0, result.stderr
    assert not _alive(mark)
    run_program(source + "time.sleep(60)", limits=Limits(seconds=1.0))
    deadline = time.monotonic() + 3
    while _alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(mark)


def _alive(mark: str) -> bool:
    return mark in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout


def test_a_fork_bomb_ends_with_the_program() -> None:
    result = run_program(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", limits=Limits(seconds=1.0)
    )
    assert result.exit_code != 0
    assert _out("print(1)") == "1"


def test_limits_alone_still_bound_time_and_memory_and_say_nothing_of_the_network() -> None:
    assert run_program("print(2)", limits=QUICK, isolation="limits").stdout == "2\n"
    assert run_program("x = bytearray(300 << 20)", limits=QUICK, isolation="limits").exit_code == 1
    assert run_program("while True: pass", limits=Limits(seconds=0.7), isolation="limits").exit_code == 137


def test_a_system_without_user_namespaces_is_refused(tmp_path: Path) -> None:
    """In a user namespace whose own limit of user namespaces is 0, as on hardened systems."""
    script = """
from pathlib import Path
from e2e_fp8.tasks.sandbox import SandboxError, run_program
Path('/proc/sys/user/max_user_namespaces').write_text('0')
try:
    run_program('print(1)')
except SandboxError as error:
    print(error)
assert run_program('print(1)', isolation='limits').stdout == '1\\n'
"""
    result = subprocess.run(["unshare", "-Ur", sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "cannot be set up on this machine" in result.stdout
    assert "task.code.isolation" in result.stdout
    assert issubclass(SandboxError, Exception)


def _prompt(*tests) -> Prompt:
    return Prompt(uid="c-1", text="write add", token_ids=(1,), answer="", metadata={"tests": list(tests)})


RIGHT = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
TESTS = ("assert add(1, 2) == 3", {"call": "add(2, 2)", "expected": "4"}, {"call": "add(0, 0)", "expected": "0"})


def test_code_reward_counts_tests_that_pass() -> None:
    cfg, partial = CodeConfig(time_limit_s=20), CodeConfig(time_limit_s=20, partial_credit=True)
    assert code_reward(_prompt(*TESTS), RIGHT, cfg) == 1.0
    assert code_reward(_prompt(*TESTS), WRONG, cfg) == 0.0
    assert code_reward(_prompt(*TESTS), WRONG, partial) == pytest.approx(1 / 3)
    echo = {"input": "3 4\n", "output": "7"}
    assert code_reward(_prompt(echo), "a, b = map(int, input().split())\nprint(a + b)", cfg) == 1.0
    assert code_reward(_prompt(echo), "print(8)", cfg) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('5'); raise SystemExit(0)",
        "class add:\n    def __new__(cls, *a): return super().__new__(cls)\n    def __eq__(self, other): return True",
        "def add(a, b): return True",
        "def add(a, b): return 4.0",
        "while True: pass",
        "def add(:",
        "",
    ],
)
def test_programs_that_cheat_or_break_get_nothing_from_values_compared_outside(code: str) -> None:
    assert code_reward(_prompt({"call": "add(2, 2)", "expected": "4"}), code, CodeConfig(time_limit_s=1)) == 0.0


def test_prompts_without_usable_tests_are_refused() -> None:
    for prompt in (_prompt(), _prompt({"in": 1}), Prompt(uid="p", text="t", token_ids=(1,), answer="", metadata={})):
        with pytest.raises(ValueError, match="unit test"):
            code_reward(prompt, RIGHT, CodeConfig())


def test_code_is_the_last_closed_block() -> None:
    assert code_of("```py\na\n``` then ```\nb\n```") == "b\n"
    assert code_of("```python\nopen") == "```python\nopen"
    assert code_of("x = 1") == "x = 1"


def test_programs_run_from_many_threads_at_once() -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda i=i: results.append(_out(f"print({i})"))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["0", "1", "2", "3"]
