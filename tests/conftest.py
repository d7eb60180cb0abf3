"""Settings of the whole suite, and its random inputs: new with every change of code or tests, the same for everyone who tests that code."""

import hashlib
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

SEED_VARIABLE = "E2E_FP8_TEST_SEED"

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("e2e_fp8", deadline=None)
settings.load_profile("e2e_fp8")


def _suite_seed() -> int:
    """``E2E_FP8_TEST_SEED``, or a function of the committed code and tests, so that a failure elsewhere happens here too; else fresh."""
    given = os.environ.get(SEED_VARIABLE)
    if given is not None:
        return int(given)
    command = ["git", "rev-parse", "HEAD:e2e_fp8", "HEAD:tests"]
    trees = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    if trees.returncode:
        return random.SystemRandom().getrandbits(32)
    return int(hashlib.sha256(trees.stdout.encode()).hexdigest()[:8], 16)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for hypothesis and for the global generators; must come before hypothesis's own hook reads the option."""
    seed = _suite_seed()
    config.stash[_SEED] = seed
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seed)


_SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    """How to get the same inputs again."""
    return f"random inputs: {SEED_VARIABLE}={config.stash[_SEED]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """The same at the end of a failed run, where a quiet one prints no header."""
    if exitstatus:
        terminalreporter.write_line(f"random inputs: {SEED_VARIABLE}={config.stash[_SEED]}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws from generators of its own, whatever ran before it; before its fixtures of any scope are made."""
    digest = hashlib.sha256(f"{item.config.stash[_SEED]} {item.nodeid}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
