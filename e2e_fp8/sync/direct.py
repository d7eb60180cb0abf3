"""The ``ipc`` transport without buckets: the engine reads the trainer's own memory, one announcement for a whole update.

The trainer's storages are exported once (one CUDA IPC handle each) and stay exported while tensors keep their addresses. Tensors
that cannot be read as they lie (views with gaps, tensors on another device, tensors that were moved since the last update)
are copied into one staging buffer. On a CPU, whose ordinary memory no other process can read, that is all of them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.buckets import ALIGNMENT, UpdateManifest
from e2e_fp8.sync.copies import CopyPlan
from e2e_fp8.sync.shared_buffers import SharedBuffers, bytes_of, device_of, device_uuid, export_storage, open_storage

STAGED = -1
"""Stands in place of a storage's index for tensors in the staging buffer."""


class DirectSender:
    """The trainer's end. Holds the exported storages, so that their addresses keep their meaning, until it is closed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._addresses: dict[str, int] = {}
        """Of the tensors that are read where they lie."""
        self._layout = ""
        self._moving: set[str] = set()
        """Tensors that came at another address than before: they are staged from then on."""
        self._storages: list[torch.UntypedStorage] = []
        self._staging: SharedBuffers | None = None
        self._staged: dict[str, torch.Tensor] = {}

    def open(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], init: Callable[[dict[str, Any]], None]) -> None:
        """Export what is not exported yet; ``init`` is called only when something is new.

        Raises EngineError when memory cannot be shared with another process.
        """
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items() if self._readable(name, tensor)}
        if self._layout == manifest.layout_digest:
            if addresses == self._addresses:
                return
            self._moving |= {name for name, address in addresses.items() if address != self._addresses.get(name, address)}
        self._release()
        self._addresses = {name: address for name, address in addresses.items() if name not in self._moving}
        try:
            init({"channel": "ipc", "parameters": self._export(manifest, tensors)})
        except BaseException:
            self.close()
            raise
        if self._staging is not None:
            self._staging.unlink()
        self._layout = manifest.layout_digest

    def _export(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Parameters of :class:`DirectReceiver`; ``places`` are (storage, first byte) in the manifest's order."""
        places: list[tuple[int, int]] = []
        indices: dict[int, int] = {}
        staged, end = [], 0
        for spec in manifest.specs():
            tensor = tensors[spec.name]
            if spec.name not in self._addresses:
                places.append((STAGED, end))
                staged.append((spec, end))
                end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
                continue
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base not in indices:
                indices[base] = len(self._storages)
                self._storages.append(storage)
            places.append((indices[base], tensor.data_ptr() - base))
        if staged:
            self._staging = SharedBuffers.create(self._device, end, 1)
            buffer = self._staging.tensors[0]
            self._staged = {s.name: buffer[start : start + s.num_bytes].view(s.dtype).view(s.shape) for s, start in staged}
        return {
            "kind": "direct",
            "layout": manifest.layout_digest,
            "uuid": device_uuid(self._device.index or 0) if self._storages else "",
            "storages": [export_storage(storage) for storage in self._storages],
            "staging": None if self._staging is None else self._staging.describe(),
            "places": places,
        }

    def _readable(self, name: str, tensor: torch.Tensor) -> bool:
        on_gpu = tensor.device.type == "cuda" and tensor.device == self._device
        return on_gpu and tensor.is_contiguous() and tensor.numel() > 0 and name not in self._moving

    def whole_update(self, manifest: UpdateManifest) -> dict[str, Any]:
        """What :meth:`send` announces."""
        return {"buckets": list(range(len(manifest.buckets)))}

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what the engine cannot read where it lies, and wait until the trainer's own kernels have written the rest."""
        CopyPlan((target, tensors[name]) for name, target in self._staged.items()).run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Callable[..., None]) -> None:
        announce(self.whole_update(manifest), first=True, last=True)

    def _release(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._staging, self._staged, self._storages, self._layout = None, {}, [], ""

    def close(self) -> None:
        """Drop the references; the engine's own last until it opens another channel."""
        self._release()


class DirectReceiver:
    """An engine rank's end: the trainer's tensors as views of its memory."""

    reusable = True
    """Views are the same objects in every update."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Raises EngineError for malformed parameters or memory that cannot be opened here."""
        self._layout = str(parameters["layout"])
        self._places = parameters["places"]
        handles = parameters["storages"]
        index = device_of(str(parameters["uuid"])) if handles else 0
        self._memory = [bytes_of(open_storage(index, handle)) for handle in handles]
        self._staging = None if parameters["staging"] is None else SharedBuffers.open(parameters["staging"])
        self._views: list[dict[str, torch.Tensor]] = []

    def expect(self, manifest: UpdateManifest) -> None:
        """Find every tensor of ``manifest``; repeated for the same layout it does nothing.

        Raises EngineError, before anything is read, for another layout or a place outside the shared memory.
        """
        if manifest.layout_digest != self._layout:
            raise EngineError("The trainer's exported memory belongs to another set of tensors; publish again.")
        if not self._views:
            self._views = self._checked_views(manifest)

    def receive(
        self, update: Mapping[str, Any], manifest: UpdateManifest, placed: Callable[..., torch.Tensor | None]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        self.expect(manifest)
        for index in update["buckets"]:
            yield index, self._views[index]

    def _checked_views(self, manifest: UpdateManifest) -> list[dict[str, torch.Tensor]]:
        """All tensors, bucket by bucket."""
        places = iter(self._places)
        found: list[dict[str, torch.Tensor]] = []
        for bucket in manifest.buckets:
            named = {}
            for spec in bucket:
                memory, start = self._place(next(places, None), spec.name)
                end = start + spec.num_bytes
                if start < 0 or start % spec.dtype.itemsize or end > memory.numel():
                    raise EngineError(f"{spec.name} lies at bytes {start} to {end} of {memory.numel()} that the trainer shared; refused.")
                named[spec.name] = memory[start:end].view(spec.dtype).view(spec.shape)
            found.append(named)
        return found

    def _place(self, place: Any, name: str) -> tuple[torch.Tensor, int]:
        if isinstance(place, list) and len(place) == 2 and all(type(value) is int for value in place):
            index, start = place
            if index == STAGED and self._staging is not None:
                return self._staging.tensors[0], start
            if 0 <= index < len(self._memory):
                return self._memory[index], start
        raise EngineError(f"The trainer announced no place in its memory for {name}; refused.")

    def close(self) -> None:
        self._views, self._memory = [], []
        if self._staging is not None:
            self._staging.close()
            self._staging = None
