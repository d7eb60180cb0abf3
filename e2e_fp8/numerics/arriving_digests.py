"""Digests of tensors that are written message by message: what has been written is read while the rest is on its way."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from e2e_fp8.numerics.digest import DigestPlan

SEGMENT_BYTES = 1 << 30
"""Read together: launches cost little beside the reading of so many, and they are what is left to read after the last message."""


class ArrivingDigests:
    """Digests of tensors that stay where they are, each read after the last message of its segment has been written.

    Messages may come in any order; segments are made for ascending ones. On a GPU the reading happens on a stream of its own, which begins
    each segment after what the writer's stream had been given when :meth:`written` was called: memory is read, never a buffer on the way.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], messages: Sequence[int], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """``messages``: for each tensor the number of the message that writes it. Errors as of ``digest.tensor_digests``."""
        self._count = len(tensors)
        self._segments: list[tuple[set[int], list[int], DigestPlan]] = []
        self._segment_of: dict[int, int] = {}
        members: list[int] = []
        size = 0
        order = sorted(range(len(tensors)), key=messages.__getitem__)
        for position, index in enumerate(order):
            members.append(index)
            size += tensors[index].nbytes
            last = position + 1 == len(order)
            if last or (size >= segment_bytes and messages[order[position + 1]] != messages[index]):
                self._add(members, [tensors[i] for i in members], {messages[i] for i in members})
                members, size = [], 0
        gpus = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._streams = [torch.cuda.Stream(device) for device in gpus]
        self._missing: list[set[int]] = []
        self._started: dict[int, Callable[[], np.ndarray]] = {}

    def _add(self, members: list[int], tensors: list[torch.Tensor], messages: set[int]) -> None:
        self._segment_of |= dict.fromkeys(messages, len(self._segments))
        self._segments.append((messages, members, DigestPlan(tensors)))

    def begin(self) -> None:
        """Nothing has been written yet of the next update."""
        self._missing, self._started = [set(messages) for messages, _, _ in self._segments], {}

    def written(self, message: int) -> None:
        """The current stream has been given everything that writes the tensors of ``message``."""
        segment = self._segment_of.get(message)
        if segment is None or segment in self._started:
            return
        self._missing[segment].discard(message)
        if not self._missing[segment]:
            self._started[segment] = self._start(self._segments[segment][2])

    def _start(self, plan: DigestPlan) -> Callable[[], np.ndarray]:
        if not self._streams:
            return plan.start()
        (stream,) = self._streams
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            return plan.start()

    def collect(self) -> np.ndarray:
        """uint64 ``[tensors]``, in their order; waits for what is still being read.

        Raises RuntimeError when some message was not written since :meth:`begin`.
        """
        if len(self._started) < len(self._segments):
            raise RuntimeError("digests of an update were asked for before all of it was written")
        digests = np.zeros(self._count, dtype=np.uint64)
        for segment, (_, members, _) in enumerate(self._segments):
            digests[members] = self._started[segment]()
        return digests
