"""Where a GPU's time goes while an engine samples, kernel by kernel."""

from collections.abc import Callable
from typing import Any

import torch

PROFILED_STEPS = 32
"""Decoding steps of a profile."""
NAME = 110
"""Characters of a kernel's name that are kept; templates have longer ones."""
ROWS = 45
"""Largest entries of a table that are shown."""


def kernel_tables(sample: Callable[[int], Any], new_tokens: int) -> dict[str, Any]:
    """``prefill`` of all prompts with one sampled token, and one step of ``decode`` after it: device microseconds, calls, kernel.

    ``sample(n)`` has every sequence sample n tokens; ``new_tokens`` is the most that it may be asked for. Raises RuntimeError without a
    GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("--profile measures kernels of a GPU, and there is none")
    steps = min(PROFILED_STEPS, new_tokens - 1)
    prefill, whole = _kernels(lambda: sample(1)), _kernels(lambda: sample(1 + steps))
    decode = {}
    for name, (us, calls) in whole.items():
        before = prefill.get(name, (0.0, 0.0))
        decode[name] = ((us - before[0]) / steps, (calls - before[1]) / steps)
    return _table("prefill", prefill) | _table("decode", decode)


def _kernels(call: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Kernel -> device microseconds, calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        us, calls = found.get(event.key[:NAME], (0.0, 0.0))
        found[event.key[:NAME]] = us + event.self_device_time_total, calls + event.count
    return found


def _table(part: str, kernels: dict[str, tuple[float, float]]) -> dict[str, Any]:
    largest = sorted(kernels.items(), key=lambda item: -item[1][0])[:ROWS]
    rows = [f"{us:10.1f} us {calls:7.1f} x {name}" for name, (us, calls) in largest if us > 0]
    return {f"{part}_device_us": round(sum(us for us, _ in kernels.values())), f"{part}_kernels": rows}
