"""Run Megatron-Core on the CPU: inside one scope, what Megatron writes as "cuda" means the CPU.

Megatron-Core names CUDA in literals (``device="cuda"``, ``tensor.type() == "torch.cuda.FloatTensor"``), in ``Tensor.cuda()`` and in
``torch.cuda`` calls. ``megatron_on_cpu()`` answers all of them with the CPU and restores everything on exit, so that other code in
the same process (vLLM) sees the real ``torch.cuda``. No source of Megatron is changed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class NullStream:
    """Stands for a CUDA stream or event where execution is synchronous: every wait is already over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> "NullStream":
        return self

    wait_stream = wait_event = record_event = synchronize = record = wait = _nothing


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaMeansCpu(TorchFunctionMode):
    """Answers CUDA device arguments, ``Tensor.cuda()`` and ``Tensor.type()`` on behalf of CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name.replace("torch.", "torch.cuda.", 1) if args[0].device.type == "cpu" else name
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            return func(*args, **kwargs)
        return func(*args)


def _replacements() -> dict[str, Any]:
    def null_stream(*args: Any, **kwargs: Any) -> NullStream:
        return NullStream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return {
        "current_device": lambda: _CPU,
        "Stream": NullStream,
        "Event": NullStream,
        "current_stream": null_stream,
        "default_stream": null_stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "synchronize": nothing,
        "empty_cache": nothing,
        "set_device": nothing,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }


_depth = 0


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Scope in which Megatron-Core's CUDA names mean the CPU. Re-entrant; not for use from several threads at once."""
    global _depth
    if _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    replacements = _replacements()
    originals = {name: getattr(torch.cuda, name) for name in replacements}
    _depth = 1
    try:
        for name, value in replacements.items():
            setattr(torch.cuda, name, value)
        with CudaMeansCpu():
            yield
    finally:
        for name, value in originals.items():
            setattr(torch.cuda, name, value)
        _depth = 0
