"""Rewards that misbehave, imported by reward workers."""

import os
import subprocess
import sys
import time
from pathlib import Path


def length(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    """Length of the response in tenths."""
    return len(response_text) / 10


def moody(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    """Does what the response says."""
    if response_text == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", metadata["mark"]])
        time.sleep(300)
    if response_text == "die":
        os._exit(3)
    if response_text == "raise":
        raise KeyError("rubric")
    if response_text == "print":
        print("noise on standard output", flush=True)
    if response_text == "slow":
        time.sleep(0.2)
    return float(os.getpid()) if response_text == "pid" else 1.0


def without_torch(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    """Whether the process has imported torch."""
    return float("torch" in sys.modules)


def meeting(prompt_text: str, response_text: str, answer: str, metadata: dict) -> float:
    """Whether another response's reward is computed while this one is; each leaves a file and waits for a second one."""
    folder, until = Path(metadata["folder"]), time.monotonic() + metadata["seconds"]
    (folder / response_text).touch()
    while time.monotonic() < until:
        if len(list(folder.iterdir())) > 1:
            return 1.0
        time.sleep(0.01)
    return 0.0
