"""Reward of responses that are Python programs: the unit tests of the prompt, each run in a sandbox of its own.

``tests`` of a prompt's metadata is a list of

- ``{"input": text, "output": text}``: standard input and output of the program, compared without trailing white space;
- ``{"call": "f(2, 3)", "expected": "5"}``: a Python expression and the literal that its value must equal;
- a text of statements such as ``"assert f(2, 3) == 5"``.

In the first two the expected value never enters the process of the program, so it cannot be read there. The third runs beside the
program, which could, if it set out to, find out how success is reported.
"""

import ast
import json
import re
import secrets
from typing import TYPE_CHECKING, Any

from e2e_fp8.config.task import CodeConfig
from e2e_fp8.tasks.sandbox import Limits, run_program

if TYPE_CHECKING:
    from e2e_fp8.types import Prompt  # imports torch, which a reward worker does not need

_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


def code_of(response_text: str) -> str:
    """The last fenced block that is closed, or the whole response where there is none."""
    blocks = _FENCE.findall(response_text)
    return blocks[-1] if blocks else response_text


def code_reward(prompt: "Prompt", response_text: str, cfg: CodeConfig) -> float:
    """1.0 when every test passes, else 0.0; with ``cfg.partial_credit`` the share of tests that pass.

    Raises:
        ValueError: the prompt has no tests, or one of another form than above.
        SandboxError: the system refuses the isolation.
    """
    tests = prompt.metadata.get("tests")
    if isinstance(tests, str):
        tests = json.loads(tests)
    if not isinstance(tests, list) or not tests:
        raise ValueError("the prompt has no list of unit tests in its column 'tests'")
    code, passed = code_of(response_text), 0
    for test in tests:
        if _passes(code, test, cfg):
            passed += 1
        elif not cfg.partial_credit:
            return 0.0
    return passed / len(tests)


def _passes(code: str, test: Any, cfg: CodeConfig) -> bool:
    limits = Limits(seconds=cfg.time_limit_s, memory_mib=cfg.memory_mib, output_kib=cfg.output_kib)
    if isinstance(test, str):
        word = secrets.token_hex(16)
        result = run_program(f"{code}\n\n{test}\nprint('\\n{word}')\n", limits=limits, isolation=cfg.isolation)
        return result.exit_code == 0 and _last_line(result.stdout) == word
    if isinstance(test, dict) and {"call", "expected"} <= test.keys():
        call = f"{code}\n\nprint('\\n' + repr({test['call']}))\n"
        result = run_program(call, limits=limits, isolation=cfg.isolation)
        return result.exit_code == 0 and _equal(_last_line(result.stdout), str(test["expected"]))
    if isinstance(test, dict) and {"input", "output"} <= test.keys():
        result = run_program(code, stdin=str(test["input"]), limits=limits, isolation=cfg.isolation)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(str(test["output"]))
    raise ValueError(f"the unit test {str(test)[:60]!r} is neither a text of statements, nor has it call and expected, or input and output")


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _equal(value: str, expected: str) -> bool:
    """Whether two literals are of one type and equal."""
    wanted = ast.literal_eval(expected)
    try:
        got = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(got) is type(wanted) and got == wanted
