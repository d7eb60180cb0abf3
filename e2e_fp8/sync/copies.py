"""Many copies of bytes as few: neighbours in both memories become one, large ones are plain copies, small ones share a launch.

Within one GPU the large ones are dealt to two streams: while one copy runs out, with fewer and fewer processors busy, another is under
way. One after another, each would leave a gap behind it.
"""

from collections.abc import Iterable
from functools import cache
from itertools import zip_longest

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.types import ExportedTensor

RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type of each element size: tensors are moved as bytes, whatever they hold."""
_WIDE = torch.int64
_LARGE_BYTES = 1 << 20
"""From here on a copy of its own costs less than its share of a joint launch, whose loads are narrower."""

Pair = tuple[torch.Tensor, torch.Tensor]


def named_once(tensors: Iterable[ExportedTensor]) -> dict[str, torch.Tensor]:
    """The tensors of one update by name, detached. Raises EngineError for a name that comes twice."""
    named: dict[str, torch.Tensor] = {}
    for entry in tensors:
        if entry.name in named:
            raise EngineError(f"Weight update refused, nothing was written: {entry.name} came twice.")
        named[entry.name] = entry.tensor.detach()
    return named


class CopyPlan:
    """Copies prepared once and run any number of times, for as long as both sides stay where they are.

    Runs in the order of the current stream and does not wait. ``num_copies`` counts plain copies and members of joint launches.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        """``pairs``: (target, source) of equal shape and dtype; a view of rows or columns is fine on either side."""
        flat: list[Pair] = []
        groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in pairs:
            if target.numel() == 0:
                continue
            if target.is_contiguous() and source.is_contiguous():
                flat.append((target, source))
                continue
            raw = RAW_DTYPES[target.element_size()]
            targets, sources = groups.setdefault(raw, ([], []))
            targets.append(target.view(raw))
            sources.append(source.view(raw))
        self._large: list[Pair] = []
        for target, source in _merged(flat):
            if target.nbytes >= _LARGE_BYTES:
                self._large.append((target, source))
                continue
            targets, sources = groups.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        self._groups = list(groups.values())
        self._halves = _balanced(self._large)
        devices = {tensor.device for pair in self._large for tensor in pair}
        gpu = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        self._beside = _stream_beside(gpu) if gpu.type == "cuda" and self._halves[1] else None
        """Takes half of the large copies; None on a CPU and between devices, where a link is what fills."""

    @property
    def num_copies(self) -> int:
        return len(self._large) + sum(len(targets) for targets, _ in self._groups)

    def run(self) -> None:
        """Start all copies."""
        with torch.no_grad():
            if self._beside is None:
                for target, source in self._large:
                    target.copy_(source, non_blocking=True)
                self._copy_groups()
                return
            current = torch.cuda.current_stream(self._beside.device)
            self._beside.wait_stream(current)
            # In turn: where all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), they start in this order.
            for own, other in zip_longest(*self._halves):
                if own is not None:
                    own[0].copy_(own[1], non_blocking=True)
                if other is not None:
                    with torch.cuda.stream(self._beside):
                        other[0].copy_(other[1], non_blocking=True)
            self._copy_groups()
            current.wait_stream(self._beside)

    def _copy_groups(self) -> None:
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all plans: torch has a few dozen streams, and deals them out again when they are used up."""
    return torch.cuda.Stream(device)


def _balanced(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Two shares of about as many bytes, each beginning with its largest."""
    shares: tuple[list[Pair], list[Pair]] = [], []
    sizes = [0, 0]
    for pair in sorted(pairs, key=lambda pair: pair[0].nbytes, reverse=True):
        lighter = 0 if sizes[0] <= sizes[1] else 1
        shares[lighter].append(pair)
        sizes[lighter] += pair[0].nbytes
    return shares


def _merged(pairs: list[Pair]) -> list[Pair]:
    """Contiguous pairs as flat integers; those that continue each other in both storages are one."""
    described = sorted(
        ((t.data_ptr(), s.data_ptr(), t.nbytes, _storage(t), _storage(s), t, s) for t, s in pairs), key=lambda entry: entry[0]
    )
    spans: list[list] = []
    for to, start, size, to_storage, from_storage, target, source in described:
        if spans:
            last = spans[-1]
            if (last[0] + last[2], last[1] + last[2], last[3], last[4]) == (to, start, to_storage, from_storage):
                last[2] += size
                continue
        spans.append([to, start, size, to_storage, from_storage, target, source])
    return [_flat(target, source, size) for _, _, size, _, _, target, source in spans]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(target: torch.Tensor, source: torch.Tensor, num_bytes: int) -> Pair:
    """Views of ``num_bytes`` from where each begins, as wide integers where both sides allow it."""
    starts = [int(t.storage_offset()) * t.element_size() for t in (target, source)]
    wide = (target.data_ptr() | source.data_ptr() | starts[0] | starts[1] | num_bytes) % _WIDE.itemsize == 0
    dtype = _WIDE if wide else torch.uint8
    views = []
    for tensor, start in zip((target, source), starts, strict=True):
        whole = torch.empty(0, dtype=dtype, device=tensor.device)
        shape = (num_bytes // dtype.itemsize,)
        views.append(whole.set_(tensor.untyped_storage(), start // dtype.itemsize, shape, (1,)))  # pyright: ignore[reportArgumentType]
    return views[0], views[1]
