"""Flat byte buffers that two processes of one host see: CUDA IPC on a GPU, POSIX shared memory on a CPU.

The only place where the ``ipc`` transport depends on the device. Handles travel as JSON values, never as pickles.
"""

import base64
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.errors import EngineError

_SHM = Path("/dev/shm")
_PREFIX = "e2e_fp8_"


class SharedBuffers:
    """``count`` uint8 buffers of ``capacity`` bytes each, made by the sender and opened by the receiver."""

    def __init__(self, tensors: list[torch.Tensor], paths: list[Path], maps: list[mmap.mmap]) -> None:
        self.tensors = tensors
        self._paths, self._maps = paths, maps

    @classmethod
    def create(cls, device: torch.device, capacity: int, count: int) -> "SharedBuffers":
        """New buffers on ``device``."""
        if device.type == "cuda":
            return cls([torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(count)], [], [])
        paths = [_SHM / f"{_PREFIX}{secrets.token_hex(16)}" for _ in range(count)]
        maps = [_map(path, os.O_CREAT | os.O_EXCL, capacity) for path in paths]
        return cls([torch.frombuffer(m, dtype=torch.uint8) for m in maps], paths, maps)

    def describe(self) -> dict[str, Any]:
        """JSON values from which :meth:`open` makes the same buffers in another process."""
        if self._paths:
            return {"kind": "shm", "paths": [str(path) for path in self._paths], "capacity": self.tensors[0].numel()}
        index = self.tensors[0].device.index
        handles = [[_encode(value) for value in tensor.untyped_storage()._share_cuda_()] for tensor in self.tensors]
        offsets = [tensor.storage_offset() for tensor in self.tensors]
        return {"kind": "cuda", "uuid": device_uuid(index), "handles": handles, "offsets": offsets, "capacity": self.tensors[0].numel()}

    @classmethod
    def open(cls, description: dict[str, Any]) -> "SharedBuffers":
        """Buffers of another process of this host. Raises EngineError when they cannot be reached."""
        capacity = int(description["capacity"])
        if description["kind"] == "shm":
            paths = [_checked_path(text) for text in description["paths"]]
            try:
                maps = [_map(path, 0, capacity) for path in paths]
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"The trainer's shared memory cannot be opened ({error}): ipc needs both processes on one host."
                ) from error
            return cls([torch.frombuffer(m, dtype=torch.uint8) for m in maps], [], maps)
        index = _device_of(str(description["uuid"]))
        tensors = []
        for handle, offset in zip(description["handles"], description["offsets"], strict=True):
            storage = torch.UntypedStorage._new_shared_cuda(index, *[_decode(value) for value in handle[1:]])
            whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
            tensors.append(whole.set_(storage, int(offset), (capacity,), (1,)))  # pyright: ignore[reportArgumentType]
        return cls(tensors, [], [])

    def unlink(self) -> None:
        """Remove the names once every receiver has the buffers open, so that nothing stays behind when a process is killed."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop the buffers; the memory goes when the other side drops it too."""
        self.unlink()
        self.tensors = []


def _map(path: Path, flags: int, capacity: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, capacity)
        elif os.fstat(descriptor).st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        return mmap.mmap(descriptor, capacity)
    finally:
        os.close(descriptor)


def _checked_path(text: str) -> Path:
    path = Path(text)
    if path.parent != _SHM or not path.name.startswith(_PREFIX):
        raise EngineError(f"The trainer named {text!r} as shared memory, which is no buffer of this program; refused.")
    return path


def _encode(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value


def device_uuid(index: int) -> str:
    """UUID of a CUDA device, the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _device_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if device_uuid(index) == uuid:
            return index
    raise EngineError(
        f"The trainer's weights lie on GPU {uuid}, which the rollout engine does not see: ipc needs one GPU or peer GPUs of one host; "
        "use sync.transport=nccl, or show both processes the same devices."
    )
