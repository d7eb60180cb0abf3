"""What an engine rank tells of its live bytes: digests of every part it can show, in full or sealed into one."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from e2e_fp8.numerics.arriving_digests import ArrivingDigests
from e2e_fp8.numerics.digest import DigestPlan, tensor_digests
from e2e_fp8.rollout.rank_layout import RankSlot
from e2e_fp8.rollout.weight_loading import LiveParameters
from e2e_fp8.sync.buckets import UpdateManifest
from e2e_fp8.sync.engine_receipt import Part, PartTable, encode_digests, seal


class LiveReceipt:
    """Digests of one rank's parts: all of them where vLLM keeps the checkpoint's layout (``in_place``), else FP8 codes and scales, read
    from the live parameters, and of the rest what arrived."""

    def __init__(
        self, slots: list[RankSlot], parameters: LiveParameters, live_now: Callable[[], Mapping[str, torch.Tensor]], *, in_place: bool
    ) -> None:
        """``live_now``: the model's parameters by name."""
        self._slots = [slot for slot in slots if slot.slot.fp8 or in_place]
        self._shown = tuple(slot.part for slot in self._slots)
        self._readable = {part.name for part in self._shown}
        self._parameters, self._live_now, self._in_place = parameters, live_now, in_place
        self._addresses: tuple = ()
        self._live: list[torch.Tensor] = []
        self._plan: DigestPlan | None = None
        self._table = PartTable(self._shown)
        self._arrived: dict[Part, int] = {}
        self._arriving: ArrivingDigests | None = None
        self._arriving_for: tuple[str, list[torch.Tensor]] = "", []
        self._is_arriving = False
        self._begun: Callable[[], np.ndarray] | None = None
        """Waits for digests of all live bytes that are being read."""
        self._beside: torch.cuda.Stream | None = None
        self._is_due = False
        """Whether digests of all live bytes are going to be asked for once one more message is written."""

    def begin(self, manifest: UpdateManifest | None) -> None:
        """An update begins; of ``manifest`` if all its buckets come in one call, whose digests :meth:`sealed` is going to ask for: each
        bucket is then read while the next ones are on their way."""
        # what they read is about to be written
        self._drain()
        self._arrived = {}
        self._is_arriving = self._in_place and manifest is not None and len(manifest.buckets) > 1
        self._is_due = self._in_place and manifest is not None and not self._is_arriving
        if manifest is None or not self._is_arriving:
            return
        live = self._live_tensors()
        if self._arriving is None or self._arriving_for[0] != manifest.layout_digest or self._arriving_for[1] is not live:
            bucket_of = {spec.name: index for index, bucket in enumerate(manifest.buckets) for spec in bucket}
            self._arriving = ArrivingDigests(live, [bucket_of[part.name] for part in self._shown])
            self._arriving_for = manifest.layout_digest, live
        self._arriving.begin()

    def written(self, bucket: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The current stream has been given everything that writes ``bucket``; ``tensors`` are what it was made of."""
        if self._is_arriving:
            assert self._arriving is not None
            self._arriving.written(bucket)
        if self._is_due:
            # It takes the CPU a millisecond, in which the GPU copies what it has been given.
            self._is_due = False
            self.begin_reading()
        if not self._in_place:
            chosen = {name: tensor for name, tensor in tensors.items() if name not in self._readable}
            parts = [Part(name=name, start=(0,) * tensor.dim(), shape=tuple(tensor.shape)) for name, tensor in chosen.items()]
            self._arrived |= dict(zip(parts, tensor_digests(list(chosen.values())), strict=True))

    def full(self, known: Collection[str]) -> dict[str, Any]:
        """``digests`` in the order of the ``PartTable`` whose digest is ``table``; ``parts``, the table, unless it is ``known``."""
        digests = self._with_arrivals(self._read())
        answer = {"table": self._table.digest, "digests": encode_digests(digests.tolist())}
        return answer if self._table.digest in known else {**answer, "parts": self._table.to_json()}

    def begin_reading(self) -> None:
        """Begin to read the live bytes as the current stream leaves them, beside what follows, unless that was begun already; on a CPU
        :meth:`sealed` reads them."""
        if self._is_arriving or not self._in_place or self._begun is not None:
            return
        plan = self._current_plan()
        device = self._live[0].device
        self._beside = self._beside or torch.cuda.Stream(device)
        self._beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._beside):
            self._begun = plan.start()

    def sealed(self) -> dict[str, Any]:
        """``table`` as of :meth:`full` and the ``seal`` of its digests, of those that are being read where there are any."""
        if self._begun is not None:
            digests, self._begun = self._begun(), None
        elif self._is_arriving:
            assert self._arriving is not None
            digests, self._is_arriving = self._arriving.collect(), False
        else:
            digests = self._read()
        return {"seal": seal(self._with_arrivals(digests)), "table": self._table.digest}

    def _with_arrivals(self, digests: np.ndarray) -> np.ndarray:
        """Digests in the order of the table, which is brought up to date."""
        if self._arrived or len(self._table.parts) != len(self._shown):
            parts = (*self._shown, *self._arrived)
            if self._table.parts != parts:
                self._table = PartTable(parts)
        return np.concatenate([digests, np.array([*self._arrived.values()], dtype=np.uint64)])

    def _read(self) -> np.ndarray:
        """uint64: digests of the live bytes now."""
        self._drain()
        return (self._current_plan() if self._in_place else DigestPlan(self._live_tensors())).run()

    def _drain(self) -> None:
        """Wait for what was begun and nobody asked for: a plan is read once at a time."""
        if self._begun is not None:
            self._begun()
            self._begun = None

    def _current_plan(self) -> DigestPlan:
        """Of live parameters, the same while nothing has moved."""
        live, plan = self._live, self._plan
        if self._live_tensors() is not live or plan is None:
            plan = self._plan = DigestPlan(self._live)
        return plan

    def _live_tensors(self) -> list[torch.Tensor]:
        """Views of the live parameters, the same list while nothing has moved."""
        if not self._in_place:
            parameters = self._live_now()
            return [slot.live(parameters) for slot in self._slots]
        addresses = self._parameters.addresses()
        if self._addresses != addresses or not self._live:
            parameters = self._parameters.named()
            self._addresses, self._live, self._plan = addresses, [slot.live(parameters) for slot in self._slots], None
        return self._live
