"""The three ways bytes travel between processes: ``ipc``, ``nccl`` and ``disk``, sender and receiver side by side.

All share one protocol. The sender opens a channel with JSON parameters (vLLM's init verb), announces buckets or a folder
(its update verb), and the receiver yields named tensors that are valid until the next one is asked for.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.buckets import TensorSpec, UpdateManifest, bucket_bytes, pack, views
from e2e_fp8.sync.process_group import BroadcastGroup
from e2e_fp8.sync.shared_buffers import SharedBuffers

TRANSPORTS = ("ipc", "nccl", "disk")
VERSION_KEY = "e2e_fp8_policy_version"
"""Key of config.json under which a checkpoint of the ``disk`` transport names its policy version."""
BUFFERS = 2
"""One bucket is filled while the other is read."""

Announce = Callable[[dict[str, Any]], None]
"""Posts an ``update_info``; returns when every rank has taken it."""
WriteFolder = Callable[[Path, Mapping[str, torch.Tensor], int], None]
"""(folder, HF name -> tensor, policy version): writes a Hugging Face checkpoint atomically."""


class Sender(Protocol):
    """The trainer's end."""

    def open(self, capacity: int, init: Callable[[dict[str, Any]], None]) -> None:
        """Make the channel ready for buckets of ``capacity`` bytes; ``init`` posts an ``init_info`` to all ranks."""
        ...

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do what can be done while the engine still generates from the old weights."""
        ...

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        """Send everything of ``manifest``; returns when every rank has taken the last byte."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine rank's end."""

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """(bucket index, HF name -> tensor) of what ``update`` announces; tensors are valid until the next pair."""
        ...

    def close(self) -> None: ...


class IpcSender:
    """Fills one shared buffer while the engine reads the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: SharedBuffers | None = None

    def open(self, capacity: int, init: Callable[[dict[str, Any]], None]) -> None:
        if self._buffers is not None and self._buffers.tensors[0].numel() >= capacity:
            return
        self.close()
        self._buffers = SharedBuffers.create(self._device, capacity, BUFFERS)
        try:
            init({"channel": "ipc", "parameters": self._buffers.describe()})
        except BaseException:
            self.close()
            raise
        self._buffers.unlink()

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing: buckets are filled while the engine reads the last one."""

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        assert self._buffers is not None
        taken: list[Future] = []
        with ThreadPoolExecutor(1) as poster:
            for index, bucket in enumerate(manifest.buckets):
                if index >= BUFFERS:
                    taken[index - BUFFERS].result()
                pack(bucket, tensors, self._buffers.tensors[index % BUFFERS])
                _synchronize(self._device)
                taken.append(poster.submit(announce, {"buckets": [index], "slot": index % BUFFERS}))
            for future in taken:
                future.result()

    def close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


class IpcReceiver:
    """Reads the trainer's shared buffers."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._buffers = SharedBuffers.open(dict(parameters))

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        buffer = self._buffers.tensors[int(update["slot"])]
        for index in update["buckets"]:
            yield index, _named(manifest.buckets[index], buffer)

    def close(self) -> None:
        self._buffers.close()


class NcclSender:
    """Broadcasts buckets to all engine ranks; the next one is packed while the last is on the wire."""

    def __init__(self, device: torch.device, *, engine_ranks: int, host: str, timeout_s: float) -> None:
        self._device, self._engine_ranks, self._host, self._timeout_s = device, engine_ranks, host, timeout_s
        self._group: BroadcastGroup | None = None
        self._buffers: list[torch.Tensor] = []

    def open(self, capacity: int, init: Callable[[dict[str, Any]], None]) -> None:
        if self._group is None:
            size = 1 + self._engine_ranks
            port, join = BroadcastGroup.listen(self._host, size, device=self._device, timeout_s=self._timeout_s)
            parameters = {"host": self._host, "port": port, "size": size, "timeout_s": self._timeout_s}
            with ThreadPoolExecutor(1) as poster:
                posted = poster.submit(init, {"channel": "nccl", "parameters": parameters})
                self._group = _join_or_refusal(join, posted)
                posted.result()
        if not self._buffers or self._buffers[0].numel() < capacity:
            self._buffers = [torch.empty(capacity, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing: buckets are packed while the last one is on the wire."""

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        group = self._group
        assert group is not None
        waiters: list[Callable[[Callable[[], None]], None]] = []
        with ThreadPoolExecutor(1) as poster:
            posted = poster.submit(announce, {"buckets": list(range(len(manifest.buckets)))})

            def check() -> None:
                if posted.done():
                    group.abort()
                    posted.result()

            try:
                for index, bucket in enumerate(manifest.buckets):
                    if index >= BUFFERS:
                        waiters[index - BUFFERS](check)
                    buffer = self._buffers[index % BUFFERS]
                    pack(bucket, tensors, buffer)
                    waiters.append(group.broadcast(buffer[: bucket_bytes(bucket)]))
                for wait in waiters[-BUFFERS:]:
                    wait(check)
            except RuntimeError as error:
                self.close()
                posted.result()
                raise EngineError(f"The weight broadcast to the rollout server failed ({error}); publish again.") from error
            posted.result()

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._buffers = []


class NcclReceiver:
    """An engine rank of the trainer's process group."""

    def __init__(self, parameters: Mapping[str, Any], *, rank: int, device: torch.device) -> None:
        host, port, size = str(parameters["host"]), int(parameters["port"]), int(parameters["size"])
        self._device = device
        self._group = BroadcastGroup.join(host, port, rank, size, device=device, timeout_s=float(parameters["timeout_s"]))
        self._buffers: list[torch.Tensor] = []

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if not self._buffers or self._buffers[0].numel() < manifest.capacity:
            self._buffers = [torch.empty(manifest.capacity, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        indices = list(update["buckets"])
        waiters = {index: self._start(index, manifest) for index in indices[:1]}
        for position, index in enumerate(indices):
            for following in indices[position + 1 : position + BUFFERS]:
                waiters[following] = self._start(following, manifest)
            waiters.pop(index)(self._group.check_trainer)
            yield index, _named(manifest.buckets[index], self._buffers[index % BUFFERS])
            _synchronize(self._device)

    def _start(self, index: int, manifest: UpdateManifest) -> Callable[[Callable[[], None]], None]:
        return self._group.broadcast(self._buffers[index % BUFFERS][: bucket_bytes(manifest.buckets[index])])

    def close(self) -> None:
        self._group.abort()
        self._buffers = []


class DiskSender:
    """Writes ``<root>/policy-<version>``, a block-FP8 Hugging Face checkpoint, and names it; two newest are kept."""

    def __init__(self, root: Path, write: WriteFolder) -> None:
        self._root, self._write = root, write

    def open(self, capacity: int, init: Callable[[dict[str, Any]], None]) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        init({"channel": "disk", "parameters": {}})

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the folder; the engine goes on until it is complete."""
        folder = policy_folder(self._root, manifest.policy_version)
        remove_folder(folder)
        self._write(folder, tensors, manifest.policy_version)

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        folder = policy_folder(self._root, manifest.policy_version)
        announce({"buckets": list(range(len(manifest.buckets))), "folder": str(folder.resolve())})
        for old in sorted(self._root.glob("policy-*"))[:-2]:
            if old != folder:
                remove_folder(old)

    def close(self) -> None:
        """Nothing to release; the newest folders stay for a cold start."""


class DiskReceiver:
    """Reads a checkpoint folder that the trainer wrote on a file system both see."""

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        folder = Path(update["folder"])
        with ExitStack() as stack:
            where: dict[str, Any] = {}
            for path in sorted(folder.glob("*.safetensors")):
                file = stack.enter_context(safe_open(path, "pt"))
                where |= dict.fromkeys(file.keys(), file)
            missing = [spec.name for spec in manifest.specs() if spec.name not in where]
            if missing:
                raise EngineError(
                    f"{folder} lacks {len(missing)} announced tensors {missing[:4]}: the disk transport needs a file system that "
                    "trainer and server share."
                )
            for index in update["buckets"]:
                yield index, {spec.name: _read(where[spec.name], spec, folder) for spec in manifest.buckets[index]}

    def close(self) -> None:
        """Nothing is held open."""


def open_receiver(channel: str, parameters: Mapping[str, Any], *, rank: int, device: torch.device) -> Receiver:
    """The receiving end for ``init_info`` of a sender; ``rank`` counts all ranks of the group, the trainer being 0."""
    if channel == "ipc":
        return IpcReceiver(parameters)
    if channel == "nccl":
        return NcclReceiver(parameters, rank=rank, device=device)
    if channel == "disk":
        return DiskReceiver()
    raise EngineError(f"Weight channel {channel!r} does not exist: use one of {', '.join(TRANSPORTS)}.")


def policy_folder(root: Path, policy_version: int) -> Path:
    """Folder of the checkpoint of ``policy_version``; names sort by version."""
    return root / f"policy-{policy_version:08d}"


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint folder in one step first, so that nobody reads half of it."""
    if folder.exists():
        doomed = folder.with_name(f".removed-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _named(bucket: tuple[TensorSpec, ...], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip((spec.name for spec in bucket), views(bucket, buffer), strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _join_or_refusal(join: Callable[[], BroadcastGroup], posted: Future) -> BroadcastGroup:
    """The joined group; when the engine refuses, its sentence instead of the timeout that follows from it."""
    try:
        return join()
    except RuntimeError as error:
        if posted.done():
            posted.result()
        raise EngineError(f"The rollout engine did not join the trainer's process group ({error}).") from error


def _read(file: Any, spec: TensorSpec, folder: Path) -> torch.Tensor:
    tensor = file.get_tensor(spec.name)
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise EngineError(f"{folder} holds {spec.name} as {tensor.dtype} {tuple(tensor.shape)}, announced as {spec.dtype} {spec.shape}.")
    return tensor
