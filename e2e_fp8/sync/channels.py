"""The three ways bytes travel between processes: ``ipc``, ``nccl`` and ``disk``, sender and receiver side by side.

All share one protocol. The sender opens a channel with JSON parameters (vLLM's init verb), announces buckets or a folder
(its update verb), and the receiver yields named tensors that are valid until the next one is asked for. ``nccl`` is in
:mod:`e2e_fp8.sync.broadcasts`; ``ipc`` without buckets, the usual one on a GPU, in :mod:`e2e_fp8.sync.direct`.
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
from e2e_fp8.sync import buckets
from e2e_fp8.sync.broadcasts import NcclReceiver
from e2e_fp8.sync.buckets import TensorSpec, UpdateManifest, views
from e2e_fp8.sync.direct import DirectReceiver
from e2e_fp8.sync.shared_buffers import SharedBuffers

TRANSPORTS = ("ipc", "nccl", "disk")
VERSION_KEY = "e2e_fp8_policy_version"
"""Key of config.json under which a checkpoint of the ``disk`` transport names its policy version."""
BUFFERS = 2
"""One bucket is filled while the other is read."""


class Announce(Protocol):
    """Posts an ``update``; returns when every rank has taken it. The ``first`` of an update begins it, the ``last`` finishes it."""

    def __call__(self, update: dict[str, Any], *, first: bool, last: bool) -> None: ...


Placed = Callable[[TensorSpec], torch.Tensor | None]
"""The engine's own memory for a tensor, if it can be received there as it lies."""
WriteFolder = Callable[[Path, Mapping[str, torch.Tensor], int], None]
"""(folder, HF name -> tensor, policy version): writes a Hugging Face checkpoint atomically."""


class Sender(Protocol):
    """The trainer's end."""

    def open(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], init: Callable[[dict[str, Any]], None]) -> None:
        """Make the channel ready for this update; ``init`` posts an ``init_info`` to all ranks."""
        ...

    def whole_update(self, manifest: UpdateManifest) -> dict[str, Any] | None:
        """What this transport announces, where that is one announcement for a whole update and known before its bytes are."""
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

    reusable: bool
    """Whether the tensors of a bucket are the same objects in every update, so that copies from them can be prepared once."""

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest, placed: Placed) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """(bucket index, HF name -> tensor) of what ``update`` announces; tensors are valid until the next pair.

        Tensors that went straight to their ``placed`` memory are left out.
        """
        ...

    def close(self) -> None: ...


class IpcSender:
    """Fills one shared buffer while the engine reads the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: SharedBuffers | None = None

    def open(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], init: Callable[[dict[str, Any]], None]) -> None:
        capacity = manifest.capacity
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

    def whole_update(self, manifest: UpdateManifest) -> dict[str, Any] | None:
        """None: a call for each bucket."""
        return None

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing: buckets are filled while the engine reads the last one."""

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        assert self._buffers is not None
        taken: list[Future] = []
        last = len(manifest.buckets) - 1
        with ThreadPoolExecutor(1) as poster:
            for index, bucket in enumerate(manifest.buckets):
                if index >= BUFFERS:
                    taken[index - BUFFERS].result()
                buckets.pack(bucket, tensors, self._buffers.tensors[index % BUFFERS])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                update = {"buckets": [index], "slot": index % BUFFERS}
                taken.append(poster.submit(announce, update, first=index == 0, last=index == last))
            for future in taken:
                future.result()

    def close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


class IpcReceiver:
    """Reads the trainer's shared buffers."""

    reusable = True

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._buffers = SharedBuffers.open(dict(parameters))
        self._views: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest, placed: Placed) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        slot = int(update["slot"])
        for index in update["buckets"]:
            key = manifest.layout_digest, index, slot
            if key not in self._views:
                bucket = manifest.buckets[index]
                self._views[key] = dict(zip((spec.name for spec in bucket), views(bucket, self._buffers.tensors[slot]), strict=True))
            yield index, self._views[key]

    def close(self) -> None:
        self._views = {}
        self._buffers.close()


class DiskSender:
    """Writes ``<root>/policy-<version>``, a block-FP8 Hugging Face checkpoint, and names it; two newest are kept."""

    def __init__(self, root: Path, write: WriteFolder) -> None:
        self._root, self._write, self._opened = root, write, False

    def open(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], init: Callable[[dict[str, Any]], None]) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        if not self._opened:
            init({"channel": "disk", "parameters": {}})
            self._opened = True

    def whole_update(self, manifest: UpdateManifest) -> dict[str, Any] | None:
        """None: reading a folder takes longer than any message."""
        return None

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the folder; the engine goes on until it is complete."""
        folder = policy_folder(self._root, manifest.policy_version)
        remove_folder(folder)
        self._write(folder, tensors, manifest.policy_version)

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Announce) -> None:
        folder = policy_folder(self._root, manifest.policy_version)
        announce({"buckets": list(range(len(manifest.buckets))), "folder": str(folder.resolve())}, first=True, last=True)
        for old in sorted(self._root.glob("policy-*"))[:-2]:
            if old != folder:
                remove_folder(old)

    def close(self) -> None:
        """Nothing to release; the newest folders stay for a cold start."""


class DiskReceiver:
    """Reads a checkpoint folder that the trainer wrote on a file system both see."""

    reusable = False

    def receive(self, update: Mapping[str, Any], manifest: UpdateManifest, placed: Placed) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
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
        return DirectReceiver(parameters) if parameters.get("kind") == "direct" else IpcReceiver(parameters)
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


def _read(file: Any, spec: TensorSpec, folder: Path) -> torch.Tensor:
    tensor = file.get_tensor(spec.name)
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise EngineError(f"{folder} holds {spec.name} as {tensor.dtype} {tuple(tensor.shape)}, announced as {spec.dtype} {spec.shape}.")
    return tensor
