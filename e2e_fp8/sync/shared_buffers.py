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

from e2e_fp8.errors import EngineError, first_line

_SHM = Path("/dev/shm")
_PREFIX = "e2e_fp8_"
_REMEDY = (
    "Allocate weights with cudaMalloc, that is without expandable_segments in PYTORCH_CUDA_ALLOC_CONF; where they lie in a memory pool "
    "of their own, sync.ipc_buckets=true (ipc_buckets=True of WeightPublisher) copies them through buffers that do not."
)


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
        paths = [new_path() for _ in range(count)]
        maps = [_map(path, os.O_CREAT | os.O_EXCL, capacity) for path in paths]
        return cls([torch.frombuffer(m, dtype=torch.uint8) for m in maps], paths, maps)

    def describe(self) -> dict[str, Any]:
        """JSON values from which :meth:`open` makes the same buffers in another process."""
        if self._paths:
            return {"kind": "shm", "paths": [str(path) for path in self._paths], "capacity": self.tensors[0].numel()}
        index = self.tensors[0].device.index
        handles = [export_storage(tensor.untyped_storage()) for tensor in self.tensors]
        return {"kind": "cuda", "uuid": device_uuid(index), "handles": handles, "capacity": self.tensors[0].numel()}

    @classmethod
    def open(cls, description: dict[str, Any]) -> "SharedBuffers":
        """Buffers of another process of this host. Raises EngineError when they cannot be reached."""
        capacity = int(description["capacity"])
        if description["kind"] == "shm":
            paths = [checked_path(text) for text in description["paths"]]
            try:
                maps = [_map(path, 0, capacity) for path in paths]
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"The trainer's shared memory cannot be opened ({error}): ipc needs both processes on one host."
                ) from error
            return cls([torch.frombuffer(m, dtype=torch.uint8) for m in maps], [], maps)
        index = device_of(str(description["uuid"]))
        storages = [open_storage(index, handle) for handle in description["handles"]]
        if min((storage.nbytes() for storage in storages), default=0) < capacity:
            raise EngineError(f"The trainer shared less memory than the {capacity} bytes it announced; refused.")
        return cls([bytes_of(storage)[:capacity] for storage in storages], [], [])

    def unlink(self) -> None:
        """Remove the names once every receiver has the buffers open, so that nothing stays behind when a process is killed."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop the buffers; the memory goes when the other side drops it too."""
        self.unlink()
        self.tensors = []


def new_path() -> Path:
    """A path in shared memory that nobody can guess."""
    return _SHM / f"{_PREFIX}{secrets.token_hex(16)}"


def open_block(path: Path, flags: int, capacity: int) -> tuple[int, mmap.mmap]:
    """(descriptor, map) of the first ``capacity`` bytes of a file of this user; ``flags`` beyond read and write, as of ``os.open``.

    Raises OSError or ValueError when it is not there, somebody else's, or smaller.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, capacity)
        elif os.fstat(descriptor).st_uid != os.getuid():
            raise OSError(f"{path} belongs to another user")
        return descriptor, mmap.mmap(descriptor, capacity)
    except BaseException:
        os.close(descriptor)
        raise


def _map(path: Path, flags: int, capacity: int) -> mmap.mmap:
    descriptor, mapped = open_block(path, flags, capacity)
    os.close(descriptor)
    return mapped


def checked_path(text: str) -> Path:
    """The path of a block that another process of this program made. Raises EngineError for any other."""
    path = Path(text)
    if path.parent != _SHM or not path.name.startswith(_PREFIX):
        raise EngineError(f"The trainer named {text!r} as shared memory, which is no buffer of this program; refused.")
    return path


def export_storage(storage: torch.UntypedStorage) -> list[Any]:
    """JSON values from which :func:`open_storage` makes the same CUDA memory in another process.

    Raises EngineError when it cannot leave the process, as memory of CUDA's virtual memory management.
    """
    try:
        return [_encode(value) for value in storage._share_cuda_()]
    except RuntimeError as error:
        raise EngineError(f"The trainer's memory cannot be shared with another process ({first_line(error)}). {_REMEDY}") from error


def open_storage(index: int, handle: Any) -> torch.UntypedStorage:
    """CUDA memory of another process of this host, seen as memory of device ``index``.

    Raises EngineError for what is no handle of :func:`export_storage`, or one that this process cannot open.
    """
    kinds = (int, bytes, int, int, bytes, int, bytes, int)
    values = [_decode(value) for value in handle] if isinstance(handle, list) else []
    if len(values) != len(kinds) or not all(isinstance(v, kind) for v, kind in zip(values, kinds, strict=True)) or min(values[2:4]) < 0:
        raise EngineError("The trainer sent a malformed handle of shared GPU memory; refused.")
    try:
        return torch.UntypedStorage._new_shared_cuda(index, *values[1:])
    except RuntimeError as error:
        raise EngineError(f"The trainer's GPU memory cannot be opened ({first_line(error)}). {_REMEDY}") from error


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as uint8 ``[nbytes]``."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))  # pyright: ignore[reportArgumentType]


def _encode(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decode(value: Any) -> Any:
    try:
        return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value
    except (KeyError, TypeError, ValueError):
        return None


def device_uuid(index: int) -> str:
    """UUID of a CUDA device, the same in every process whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(index).uuid)


def device_of(uuid: str) -> int:
    """Index of the CUDA device with this UUID in this process. Raises EngineError when it is not visible."""
    for index in range(torch.cuda.device_count()):
        if device_uuid(index) == uuid:
            return index
    raise EngineError(
        f"The trainer's weights lie on GPU {uuid}, which the rollout engine does not see: ipc needs one GPU or peer GPUs of one host; "
        "use sync.transport=nccl, or show both processes the same devices."
    )
