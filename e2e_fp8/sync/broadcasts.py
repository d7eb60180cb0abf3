"""The ``nccl`` transport: broadcasts from the trainer to all engine ranks, back to back, one announcement for a whole update.

Each bucket is one message. A bucket whose tensors follow each other in memory leaves the trainer's and enters the engine's as it lies
where either side allows it, which is that side's own choice; others are packed and unpacked through two buffers, on a GPU in
stream order, so that the next bucket is packed and the last one unpacked while one is on the wire.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from e2e_fp8.errors import EngineError, first_line
from e2e_fp8.sync.background import raise_failure
from e2e_fp8.sync.buckets import TensorSpec, UpdateManifest, bucket_bytes, lying, packing, views
from e2e_fp8.sync.copies import CopyPlan
from e2e_fp8.sync.process_group import BroadcastGroup

BUFFERS = 2
"""One bucket is packed or unpacked while another is on the wire."""
_AHEAD = 4
"""Messages that are started beyond the last one known to be over, so that buffers and time limits are of a few messages only."""
ALONE_FRACTION = 16
"""A tensor of this part of the largest bucket, or those of one parameter that are so many bytes together, is a message of its own."""

Bucket = tuple[TensorSpec, ...]


class NcclSender:
    """The trainer's end, rank 0 of the group."""

    def __init__(self, device: torch.device, *, engine_ranks: int, host: str, timeout_s: float) -> None:
        self._device, self._engine_ranks, self._host, self._timeout_s = device, engine_ranks, host, timeout_s
        self._group: BroadcastGroup | None = None
        self._buffers: list[torch.Tensor] = []
        self._addresses: tuple = ()
        self._settled = False
        """Whether tensors lie where they lay in the last update; only then plans, which hold them, outlive one."""
        self._plans: dict[int, CopyPlan] = {}
        self._lying: dict[int, torch.Tensor | None] = {}
        """Buckets as they lie in the tensors' memory, by index; None for those that are packed."""

    def open(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], init: Callable[[dict[str, Any]], None]) -> None:
        if self._group is None:
            size = 1 + self._engine_ranks
            port, join = BroadcastGroup.listen(self._host, size, device=self._device, timeout_s=self._timeout_s)
            parameters = {"host": self._host, "port": port, "size": size, "timeout_s": self._timeout_s}
            with ThreadPoolExecutor(1) as poster:
                posted = poster.submit(init, {"channel": "nccl", "parameters": parameters})
                self._group = _join_or_refusal(join, posted)
                posted.result()
        addresses = (manifest.layout_digest, *(t.data_ptr() for t in tensors.values()))
        self._settled = addresses == self._addresses
        if not self._settled or not self._lying:
            self._lying = {index: self._whole(bucket, tensors) for index, bucket in enumerate(manifest.buckets)}
        packed = (bucket for index, bucket in enumerate(manifest.buckets) if self._lying[index] is None)
        capacity = max((bucket_bytes(bucket) for bucket in packed), default=0)
        if _grown(self._buffers, capacity, self._device) or not self._settled:
            self._plans = {}
        self._addresses = addresses

    def _whole(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The bucket's bytes where they lie, if its tensors follow each other on this device."""
        own = [tensors[spec.name] for spec in bucket]
        return lying(bucket, own) if own[0].device == self._device else None

    def whole_update(self, manifest: UpdateManifest) -> dict[str, Any]:
        """What :meth:`send` announces."""
        return {"buckets": list(range(len(manifest.buckets)))}

    def stage(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing: buckets are packed while the last one is on the wire."""

    def send(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], announce: Callable[..., None]) -> None:
        group = self._group
        assert group is not None
        with ThreadPoolExecutor(1) as poster:
            posted = poster.submit(announce, self.whole_update(manifest), first=True, last=True)

            try:
                with group.watched(lambda: raise_failure(posted)), _side_stream(self._device):
                    for work in self._start_all(group, manifest, tensors):
                        group.finish(work)
            except RuntimeError as error:
                self.close()
                posted.result()
                raise EngineError(f"The weight broadcast to the rollout server failed ({first_line(error)}); publish again.") from error
            except BaseException:
                # the engine waits for messages that will not come
                self.close()
                raise
            posted.result()
        if not self._settled:
            self._plans, self._lying = {}, {}

    def _start_all(self, group: BroadcastGroup, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        works, in_slot, packed = [], [None] * BUFFERS, 0
        for index, bucket in enumerate(manifest.buckets):
            if index >= _AHEAD:
                group.finish(works[index - _AHEAD])
            message = self._lying[index]
            if message is not None:
                works.append(group.broadcast(message))
                continue
            slot, packed = packed % BUFFERS, packed + 1
            if in_slot[slot] is not None:
                group.order(in_slot[slot])
            message = self._buffers[slot][: bucket_bytes(bucket)]
            if index not in self._plans:
                self._plans[index] = packing(bucket, tensors, message)
            self._plans[index].run()
            in_slot[slot] = group.broadcast(message)
            works.append(in_slot[slot])
        return works

    def close(self) -> None:
        if self._group is not None:
            self._group.give_up()
            self._group = None
            if self._device.type == "cuda":
                # packs that waited for an aborted message still write into the buffers
                torch.cuda.synchronize(self._device)
        self._buffers, self._plans, self._lying = [], {}, {}


class NcclReceiver:
    """An engine rank of the trainer's process group."""

    reusable = True
    """Tensors of a bucket are the same objects in every update."""

    def __init__(self, parameters: Mapping[str, Any], *, rank: int, device: torch.device) -> None:
        host, port, size = str(parameters["host"]), int(parameters["port"]), int(parameters["size"])
        self._device = device
        self._group = BroadcastGroup.join(host, port, rank, size, device=device, timeout_s=float(parameters["timeout_s"]))
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[str, int, int], dict[str, torch.Tensor]] = {}
        self._straight: dict[tuple[str, int], tuple[int, torch.Tensor | None]] = {}
        """Layout and bucket -> where its first tensor belongs, and the bucket's bytes there if they can be received as they lie."""

    def receive(
        self, update: Mapping[str, Any], manifest: UpdateManifest, placed: Callable[[TensorSpec], torch.Tensor | None]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Buckets in order; one that went straight to where ``placed`` wants it comes without tensors."""
        buckets = {int(index): manifest.buckets[index] for index in update["buckets"]}
        straight = {index: self._placed_whole(manifest.layout_digest, index, bucket, placed) for index, bucket in buckets.items()}
        buffered = [index for index in buckets if straight[index] is None]
        if _grown(self._buffers, max((bucket_bytes(buckets[index]) for index in buffered), default=0), self._device):
            self._views = {}
        slots = {index: turn % BUFFERS for turn, index in enumerate(buffered)}
        waiting, works = list(buckets), []
        with self._group.watched(self._group.check_trainer), _in_a_sentence():
            for position, index in enumerate(buckets):
                # Started one ahead: the next message has a buffer of its own, and the one before has been unpacked from it.
                for following in waiting[len(works) : position + BUFFERS]:
                    target = straight[following]
                    if target is None:
                        target = self._buffers[slots[following]][: bucket_bytes(buckets[following])]
                    works.append(self._group.broadcast(target))
                if position >= _AHEAD:
                    self._group.finish(works[position - _AHEAD])
                self._group.order(works[position])
                yield index, self._named(manifest, index, slots[index]) if index in slots else {}
            for work in works:
                self._group.finish(work)

    def _placed_whole(
        self, layout: str, index: int, bucket: Bucket, placed: Callable[[TensorSpec], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Where ``bucket`` can be received without a buffer, as bytes. It lies in one parameter, so its first tensor tells of a move."""
        first = placed(bucket[0])
        address = 0 if first is None else first.data_ptr()
        if self._straight and next(iter(self._straight))[0] != layout:
            self._straight.clear()
        known = self._straight.get((layout, index))
        if known is None or known[0] != address:
            target = None if first is None else lying(bucket, [first, *map(placed, bucket[1:])])
            known = self._straight[layout, index] = address, target
        return known[1]

    def _named(self, manifest: UpdateManifest, index: int, slot: int) -> dict[str, torch.Tensor]:
        key = manifest.layout_digest, index, slot
        if key not in self._views:
            bucket = manifest.buckets[index]
            self._views[key] = dict(zip((spec.name for spec in bucket), views(bucket, self._buffers[slot]), strict=True))
        return self._views[key]

    def close(self) -> None:
        self._group.abort()
        self._buffers, self._views, self._straight = [], {}, {}


def _grown(buffers: list[torch.Tensor], capacity: int, device: torch.device) -> bool:
    """Replace ``buffers`` when one of them is smaller than ``capacity``; whether that was done."""
    if capacity == 0 or (buffers and buffers[0].numel() >= capacity):
        return False
    buffers.clear()
    buffers.extend(torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(BUFFERS))
    return True


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """A stream that begins after what the current one has been given; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    """What a library says of a broken message, as an error that a user can act on."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"The weights of an update did not all come ({first_line(error)}); publish again.") from error


def _join_or_refusal(join: Callable[..., BroadcastGroup], posted: Future) -> BroadcastGroup:
    """The joined group; when the engine refuses, its sentence at once."""
    try:
        return join(lambda: raise_failure(posted))
    except RuntimeError as error:
        raise_failure(posted)
        raise EngineError(f"The rollout engine did not join the trainer's process group ({first_line(error)}).") from error
