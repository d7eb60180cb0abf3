"""The trainer's side of weight updates into a running ``vllm serve``: usable from any training loop, imports no vLLM.

publisher = WeightPublisher("http://127.0.0.1:8000", token, transport="ipc", device=torch.device("cpu"))
publisher.publish(tensors, policy_version=1)     # raises ByteMismatchError unless the engine holds these bytes
publisher.arm(2)                                 # optional, from the third sync on: before the optimizer step that makes version 2
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from e2e_fp8.errors import ByteMismatchError, ConfigError, EngineError
from e2e_fp8.sync.announcer import ArmedUpdate, UpdateAnnouncer
from e2e_fp8.sync.broadcasts import ALONE_FRACTION, NcclSender
from e2e_fp8.sync.buckets import UpdateManifest, plan_update
from e2e_fp8.sync.channels import TRANSPORTS, DiskSender, IpcSender, Sender, WriteFolder
from e2e_fp8.sync.control import UnpreparedError, UpdateControl
from e2e_fp8.sync.direct import DirectSender
from e2e_fp8.sync.engine_receipt import PartTable, RankReceipts, decode_digests
from e2e_fp8.sync.publish_report import PhaseClock, PublishReport
from e2e_fp8.sync.receipt import Manifest
from e2e_fp8.sync.settled import NamedTensors
from e2e_fp8.types import ExportedTensor

_UNCUT_BYTES = 1 << 62
_CLOSE_S = 10.0
"""A server that hangs must not keep the trainer from ending."""


@dataclass(frozen=True, kw_only=True)
class _Delivered:
    """Every rank has every byte."""

    answers: Sequence[dict[str, Any]]
    """Of the ranks to the last announcement."""
    own: np.ndarray | None
    """Digests of the trainer's own bytes, if a receipt can use them already."""
    seconds: float
    armed: bool = False


class WeightPublisher:
    """Delivers complete sets of HF-named tensors into one server and proves that they arrived.

    ``transport``: ``ipc`` (same host; ``device`` is where the tensors are), ``nccl`` (other GPUs or hosts; ``host`` is this
    machine's address, 127.0.0.1 within one), ``disk`` (``folder`` on a shared file system, ``write_folder`` writes a checkpoint).

    ``ipc`` on a GPU lets the engine read the trainer's memory as it lies; with ``ipc_buckets=True`` tensors are copied through
    buffers, as on a CPU, where ``ipc_buckets=False`` means one buffer for all.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        transport: str,
        device: torch.device,
        timeout_s: float = 600.0,
        max_bucket_bytes: int = 512 << 20,
        ipc_buckets: bool | None = None,
        host: str = "127.0.0.1",
        folder: Path | None = None,
        write_folder: WriteFolder | None = None,
    ) -> None:
        """Raises ConfigError for an unknown transport or a missing folder, EngineError when the server is not there."""
        if transport not in TRANSPORTS:
            raise ConfigError(f"Weight transport {transport!r} does not exist: use one of {', '.join(TRANSPORTS)}.")
        if transport == "disk" and (folder is None or write_folder is None):
            raise ConfigError("The disk transport needs a folder and a function that writes a checkpoint: give folder and write_folder.")
        self.control = UpdateControl(url, token, timeout_s=timeout_s)
        self.client, self.workers = self.control.client, self.control.workers
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device, self._transport = device, transport
        direct = transport == "ipc" and (device.type == "cuda" if ipc_buckets is None else not ipc_buckets)
        # Memory that is read where it lies needs no cutting.
        self._packing: dict[str, Any] = {"max_bytes": _UNCUT_BYTES if direct else max_bucket_bytes}
        if transport == "nccl":
            self._packing["alone_bytes"] = max_bucket_bytes // ALONE_FRACTION
        self._open = self._opener(transport, direct, host, timeout_s, folder, write_folder)
        self._sender: Sender | None = None
        self._named = NamedTensors()
        self._last: Mapping[str, torch.Tensor] | None = None
        """The tensors of the last update, if they may come again."""
        self._open_for: Mapping[str, torch.Tensor] | None = None
        """Tensors for which the sender has been opened twice: it knows then that they stay where they are."""
        self._planned_last: tuple[tuple, UpdateManifest] | None = None
        self._announcer = UpdateAnnouncer(self.control, timeout_s=timeout_s)
        self.not_armed = ""
        """Why the last :meth:`arm` did nothing."""
        self._tables: dict[str, PartTable] = {}
        self._receipts: RankReceipts | None = None
        self._reading: torch.cuda.Stream | None = None
        """Where a GPU trainer reads its own bytes for a receipt."""

    def _opener(
        self, transport: str, direct: bool, host: str, timeout_s: float, folder: Path | None, write: WriteFolder | None
    ) -> Callable[[], Sender]:
        if transport == "ipc":
            return lambda: DirectSender(self._device) if direct else IpcSender(self._device)
        if transport == "nccl":
            self._refuse_shared_gpu()
            return lambda: NcclSender(self._device, engine_ranks=len(self.workers), host=host, timeout_s=timeout_s)
        assert folder is not None
        assert write is not None
        return lambda: DiskSender(folder, write)

    def _refuse_shared_gpu(self) -> None:
        if self._device.type != "cuda":
            return
        from e2e_fp8.sync.shared_buffers import device_uuid

        own = device_uuid(self._device.index or 0)
        if any(worker["device_uuid"] == own for worker in self.workers):
            raise ConfigError(f"Trainer and rollout engine share GPU {own}, and NCCL needs one GPU for each rank: use transport ipc.")

    def arm(self, policy_version: int, *, receipt: bool = True, in_flight: str = "wait", patience_s: float | None = None) -> bool:
        """Announce that :meth:`publish` comes with the last tuple as ``policy_version`` and the same options; whether that was possible.

        Generation is paused from then on (503), and the engine's ranks wait with the old weights whole, so that of the update only the
        copies come after the weights are ready. The call itself does not wait. Anything else but that ``publish`` cancels, as
        :meth:`disarm` does: the old version serves again, as it does when this process dies or has not published after ``patience_s``
        (by default the publisher's ``timeout_s``). Meanwhile the server answers 409 to what else needs its workers.

        False, :attr:`not_armed` saying why, unless the same tuple was published twice, by ``ipc`` without buckets or ``nccl``, and the
        engine's ranks share this host's memory. Nothing was done then.

        Raises ConfigError for an ``in_flight`` that is neither, EngineError when the server is gone.
        """
        _check_in_flight(in_flight)
        self.disarm()
        self.not_armed = "these tensors were not published twice as one tuple that stays where it is"
        if self._sender is None or self._planned_last is None or self._last is None or self._last is not self._open_for:
            return False
        manifest = self._planned_last[1].at_version(policy_version)
        update = self._sender.whole_update(manifest)
        if update is None:
            self.not_armed = f"transport {self._transport} takes more than one call"
            return False
        sealed = receipt and self._receipts is not None
        patience_s = self.control.client.timeout_s if patience_s is None else patience_s
        key = (policy_version, receipt, in_flight)
        self.not_armed = self._announcer.arm(key, manifest, self._last, update, sealed=sealed, patience_s=patience_s)
        return not self.not_armed

    def disarm(self) -> None:
        """Take back what :meth:`arm` announced and wait until the old version serves again; nothing when nothing is announced.

        Raises EngineError when the server does not end it.
        """
        self._announcer.cancel()

    def publish(
        self, tensors: Iterable[ExportedTensor], *, policy_version: int, receipt: bool = True, in_flight: str = "wait"
    ) -> PublishReport:
        """Deliver a complete set of weights and compare bytes; generation resumes only after both succeeded.

        Requests in flight finish under the old weights (``in_flight="wait"``) or are cut short (``"abort"``). A call after a
        failed one, here or in a process that was killed, starts over. The same tuple again, its tensors where they were, is known
        again, which saves naming, planning and opening.

        Raises:
            ConfigError: ``in_flight`` is neither.
            EngineError: the server refuses (names, shapes, dtypes; nothing was written then), dies, or does not answer.
            ByteMismatchError: the engine's bytes are not the given ones; the server keeps refusing to generate.
        """
        _check_in_flight(in_flight)
        clock = PhaseClock()
        self._announcer.soon()
        try:
            named = self._named.of(tensors)
            armed = self._announcer.claimed((policy_version, receipt, in_flight), named)
        except BaseException:
            self._announcer.forget(_CLOSE_S)
            raise
        manifest = self._planned(named, policy_version)
        clock.mark("plan")
        try:
            done = None if armed is None else self._deliver_armed(armed, manifest, named, clock, receipt=receipt)
            if done is None:
                done = self._deliver_now(manifest, named, in_flight, clock, receipt=receipt)
            proof = self._receipt(named, policy_version, done.answers, done.own, clock) if receipt else None
        except BaseException:
            self._forget()
            raise
        compared = clock.total()
        self._last = named if self._named.keeps(named) else None
        self.control.resume(policy_version if receipt else None)
        clock.mark("resume")
        return PublishReport(
            policy_version=policy_version,
            num_bytes=manifest.num_bytes,
            seconds=done.seconds,
            receipt_seconds=compared - done.seconds if receipt else 0.0,
            receipt=proof,
            phases=clock.seconds,
            armed=done.armed,
        )

    def _planned(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> UpdateManifest:
        """The update's manifest; made anew only when names, dtypes or shapes are others than the last time."""
        if tensors is not self._last or self._planned_last is None:
            signature = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
            if self._planned_last is None or self._planned_last[0] != signature:
                manifest = plan_update(list(tensors.items()), policy_version=policy_version, **self._packing)
                self._planned_last, self._receipts = (signature, manifest), None
        return self._planned_last[1].at_version(policy_version)

    def _deliver_armed(
        self, armed: ArmedUpdate, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], clock: PhaseClock, *, receipt: bool
    ) -> _Delivered | None:
        """None, and nothing is written or announced any more, when the ranks do not wait for this trainer."""
        sender = self._sender
        assert sender is not None
        sender.stage(manifest, tensors)
        clock.mark("stage")
        if not armed.go():
            self.disarm()
            clock.mark("disarm")
            return None
        with ThreadPoolExecutor(1) as reader:
            own = reader.submit(self._own_digests(tensors)) if receipt and self._receipts is not None else None
            sender.send(manifest, tensors, lambda update, *, first, last: armed.written())
            clock.mark("send")
            seconds = clock.total()
            digests = None if own is None else own.result()
        clock.mark("receipt: trainer")
        answers = armed.answers()
        self._announcer.finished()
        clock.mark("receipt: engine" if receipt else "answer")
        clock.add("send: engine copies", max(rank["seconds"] for rank in answers))
        return _Delivered(answers=answers, own=digests, seconds=seconds, armed=True)

    def _deliver_now(
        self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], in_flight: str, clock: PhaseClock, *, receipt: bool
    ) -> _Delivered:
        try:
            answers, own = self._deliver(manifest, tensors, in_flight, clock, receipt=receipt)
        except UnpreparedError:
            # The server was started again, or another trainer published to it, since the last update.
            self._forget()
            with suppress(EngineError):
                self.control.resume()
            answers, own = self._deliver(manifest, tensors, in_flight, clock, receipt=receipt)
        reading = max(answer.get("receipt_seconds", 0.0) for answer in answers)
        seconds = clock.total() - clock.seconds["receipt: trainer"] - reading
        clock.move(reading, "send", "receipt: engine")
        return _Delivered(answers=answers, own=own, seconds=seconds)

    def _deliver(
        self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], in_flight: str, clock: PhaseClock, *, receipt: bool
    ) -> tuple[list[dict[str, Any]], np.ndarray | None]:
        """(the ranks' answers to the last announcement, digests of the trainer's own bytes if a receipt can use them already)."""
        if not self.control.prepare(manifest):
            self._drop_sender()
        clock.mark("prepare")
        sender = self._sender = self._sender or self._open()
        if tensors is not self._open_for:
            sender.open(manifest, tensors, self.control.open_channel)
            self._open_for = tensors if tensors is self._last else None
        clock.mark("open")
        sender.stage(manifest, tensors)
        clock.mark("stage")
        answers: list[dict[str, Any]] = []

        def announce(update: dict[str, Any], *, first: bool, last: bool) -> None:
            sealed = receipt and last and self._receipts is not None
            told = self.control.announce(manifest, update, first=first, last=last, in_flight=in_flight, receipt=sealed, compare=receipt)
            clock.add("send: engine copies", max(rank["seconds"] for rank in told))
            answers[:] = told

        with ThreadPoolExecutor(1) as reader:
            # Both sides' memory is read while bytes are under way.
            own = reader.submit(self._own_digests(tensors)) if receipt and self._receipts is not None else None
            sender.send(manifest, tensors, announce)
            clock.mark("send")
            digests = None if own is None else own.result()
        clock.mark("receipt: trainer")
        return answers, digests

    def _own_digests(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], np.ndarray]:
        """A call, for another thread, that reads ``tensors`` as the current stream leaves them, beside what is sent meanwhile."""
        receipts, kept = self._receipts, self._named.keeps(tensors)
        assert receipts is not None
        if self._device.type != "cuda":
            return lambda: receipts.expected(tensors, kept=kept)
        self._reading = self._reading or torch.cuda.Stream(self._device)
        stream, written = self._reading, torch.cuda.current_stream(self._device).record_event()

        def digests() -> np.ndarray:
            with torch.cuda.stream(stream):
                stream.wait_event(written)
                return receipts.expected(tensors, kept=kept)

        return digests

    def _receipt(
        self,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        answers: Sequence[Mapping[str, Any]],
        own: np.ndarray | None,
        clock: PhaseClock,
    ) -> Manifest:
        proof = None if own is None or self._receipts is None else self._receipts.agreed(own, answers)
        if proof is None:
            # The first time, and where something differs, whose name is wanted.
            proof = self._compared(tensors, policy_version)
        clock.mark("receipt: compare")
        return proof

    def _compared(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> Manifest:
        """Every digest of every rank, asked for and compared. Raises ByteMismatchError."""
        kept = self._named.keeps(tensors)
        answers = self.client.collective("receipt", json.dumps(sorted(self._tables)))
        for answer in answers:
            if "parts" in answer:
                table = PartTable.from_json(answer["parts"])
                self._tables[table.digest] = table
        tables = tuple(self._tables[answer["table"]] for answer in answers)
        if self._receipts is None or self._receipts.tables != tables:
            self._receipts = RankReceipts(tensors, tables)
        expected = self._receipts.expected(tensors, kept=kept)
        ranks = [decode_digests(answer["digests"]) for answer in answers]
        try:
            return self._receipts.check(tensors, expected, ranks, policy_version=policy_version)
        except ByteMismatchError:
            self.control.refuse(f"the receipt of policy version {policy_version} failed")
            raise

    def _forget(self) -> None:
        """The other end may be gone or in an unknown state; the next update prepares and opens a channel again."""
        self._announcer.forget(_CLOSE_S)
        self.control.forget()
        self._drop_sender()

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = self._open_for = self._last = None

    def policy_version(self) -> int | None:
        """See :meth:`UpdateControl.policy_version`; cancels what :meth:`arm` announced."""
        self.disarm()
        return self.control.policy_version()

    def close(self) -> None:
        """Release buffers, exported memory and process groups at both ends; the server keeps serving."""
        self._announcer.forget(_CLOSE_S)
        if self._sender is not None:
            # Memory that the engine has open is not free for the trainer.
            self.control.close_channel()
        self._forget()
        self._named, self._planned_last, self._receipts = NamedTensors(), None, None
        self.client.close()
        self.control.waiting_client.close()


def _check_in_flight(in_flight: str) -> None:
    if in_flight not in ("wait", "abort"):
        raise ConfigError(f"in_flight is {in_flight!r}: use wait or abort.")
