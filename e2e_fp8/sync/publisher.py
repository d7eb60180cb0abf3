"""The trainer's side of weight updates into a running ``vllm serve``: usable from any training loop, imports no vLLM.

publisher = WeightPublisher("http://127.0.0.1:8000", token, transport="ipc", device=torch.device("cpu"))
publisher.publish(tensors, policy_version=1)     # raises ByteMismatchError unless the engine holds these bytes
publisher.arm(2)                                 # optional, from the third sync on: before the optimizer step that makes version 2
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from e2e_fp8.errors import ConfigError, EngineError
from e2e_fp8.sync.announcer import ArmedUpdate, UpdateAnnouncer
from e2e_fp8.sync.background import Background
from e2e_fp8.sync.broadcasts import ALONE_FRACTION, NcclSender
from e2e_fp8.sync.buckets import UpdateManifest, plan_update
from e2e_fp8.sync.channels import TRANSPORTS, DiskSender, IpcSender, Sender, WriteFolder
from e2e_fp8.sync.comparisons import Comparisons
from e2e_fp8.sync.control import UnpreparedError, UpdateControl
from e2e_fp8.sync.direct import DirectSender
from e2e_fp8.sync.process_group import nccl_device
from e2e_fp8.sync.publish_report import PendingReceipt, PhaseClock, PublishReport, Wish
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
    own: Callable[[], np.ndarray] | None
    """Waits for digests of the trainer's own bytes, if a receipt can use them already."""
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
        self._comparisons = Comparisons(self.control, device)
        self._background: Background | None = None
        """Compares while the server generates."""
        self._pending: PendingReceipt | None = None
        """Of the last update, if its bytes were compared while the server generated."""

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
        own = nccl_device(self._device.index or 0)
        if any(worker["nccl_device"] == own for worker in self.workers):
            raise ConfigError(f"Trainer and rollout engine share GPU {own}, and NCCL needs one GPU for each rank: use transport ipc.")

    def arm(
        self,
        policy_version: int,
        *,
        receipt: bool = True,
        in_flight: str = "wait",
        before: str = "generation",
        patience_s: float | None = None,
    ) -> bool:
        """Announce that :meth:`publish` comes with the last tuple as ``policy_version`` and the same options; whether that was possible.

        Generation is paused from then on (503), and the engine's ranks wait with the old weights whole, so that of the update only the
        copies come after the weights are ready. The call itself does not wait. Anything else but that ``publish`` cancels, as
        :meth:`disarm` does: the old version serves again, as it does when this process dies or has not published after ``patience_s``
        (by default the publisher's ``timeout_s``; with ``before="answers"`` it is also what answers wait for the comparison). Meanwhile the
        server answers 409 to what else needs its workers.

        False, :attr:`not_armed` saying why, unless the same tuple was published twice, by ``ipc`` without buckets or ``nccl``, and the
        engine's ranks share this host's memory. Nothing was done then.

        Raises ConfigError for an ``in_flight`` or ``before`` that is neither, EngineError when the server is gone, ByteMismatchError as
        :meth:`settle` does.
        """
        wish = Wish(receipt=receipt, in_flight=in_flight, before=before)
        self.settle()
        self.disarm()
        self.not_armed = "these tensors were not published twice as one tuple that stays where it is"
        if self._sender is None or self._planned_last is None or self._last is None or self._last is not self._open_for:
            return False
        manifest = self._planned_last[1].at_version(policy_version)
        update = self._sender.whole_update(manifest)
        if update is None:
            self.not_armed = f"transport {self._transport} takes more than one call"
            return False
        wish = wish.where(parts_known=self._comparisons.knows_parts)
        patience_s = self.control.client.timeout_s if patience_s is None else patience_s
        self.not_armed = self._announcer.arm(manifest, self._last, update, wish, patience_s=patience_s)
        return not self.not_armed

    def disarm(self) -> None:
        """Take back what :meth:`arm` announced and wait until the old version serves again; nothing when nothing is announced.

        Raises EngineError when the server does not end it.
        """
        self._announcer.cancel()

    def publish(
        self,
        tensors: Iterable[ExportedTensor],
        *,
        policy_version: int,
        receipt: bool = True,
        in_flight: str = "wait",
        before: str = "generation",
    ) -> PublishReport:
        """Deliver a complete set of weights and compare bytes; generation resumes only after both succeeded.

        With ``before="answers"`` it resumes once every byte is there, and no answer leaves the server before bytes were compared, which
        goes on in another thread when this returns: see ``PublishReport.settled`` and :meth:`settle`. The first sync of a set of tensors
        compares before generation all the same, since parts have to be named.

        Requests in flight finish under the old weights (``in_flight="wait"``) or are cut short (``"abort"``). A call after a
        failed one, here or in a process that was killed, starts over. The same tuple again, its tensors where they were, is known
        again, which saves naming, planning and opening.

        Raises:
            ConfigError: ``in_flight`` or ``before`` is neither.
            EngineError: the server refuses (names, shapes, dtypes; nothing was written then), dies, or does not answer.
            ByteMismatchError: the engine's bytes are not the given ones, or were not those of the last update; the server refuses to
                generate from then on.
        """
        wish = Wish(receipt=receipt, in_flight=in_flight, before=before)
        self.settle()
        clock = PhaseClock()
        self._announcer.soon()
        try:
            named = self._named.of(tensors)
            armed = self._announcer.claimed(policy_version, wish.where(parts_known=self._comparisons.knows_parts), named)
        except BaseException:
            self._announcer.forget(_CLOSE_S)
            raise
        manifest = self._planned(named, policy_version)
        clock.mark("plan")
        wish, proof = wish.where(parts_known=self._comparisons.knows_parts), None
        try:
            done = None if armed is None else self._deliver_armed(armed, manifest, named, clock, wish)
            if done is None:
                done = self._deliver_now(manifest, named, clock, wish)
            if wish.meanwhile:
                assert done.own is not None
                self._pending = self._compare_meanwhile(named, policy_version, done.own)
            elif receipt:
                own, kept = None if done.own is None else done.own(), self._named.keeps(named)
                clock.mark("receipt: trainer")
                proof = self._comparisons.proof(named, own, done.answers, policy_version=policy_version, kept=kept)
                clock.mark("receipt: compare")
        except BaseException:
            self._forget()
            raise
        compared = clock.total()
        self._last = named if self._named.keeps(named) else None
        if not wish.resume:
            self.control.resume(policy_version)
            clock.mark("resume")
        receipt_seconds = 0.0 if proof is None else compared - done.seconds
        return PublishReport(
            policy_version=policy_version,
            num_bytes=manifest.num_bytes,
            seconds=done.seconds,
            receipt_seconds=receipt_seconds,
            answer_seconds=clock.total() - done.seconds - receipt_seconds,
            receipt=proof,
            phases=clock.seconds,
            armed=done.armed,
            pending=self._pending,
        )

    def _planned(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> UpdateManifest:
        """The update's manifest; made anew only when names, dtypes or shapes are others than the last time."""
        if tensors is not self._last or self._planned_last is None:
            signature = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
            if self._planned_last is None or self._planned_last[0] != signature:
                manifest = plan_update(list(tensors.items()), policy_version=policy_version, **self._packing)
                self._planned_last = signature, manifest
                self._comparisons.forget()
        return self._planned_last[1].at_version(policy_version)

    def _deliver_armed(
        self, armed: ArmedUpdate, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], clock: PhaseClock, wish: Wish
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
        own = self._own_digests(tensors, wish, sent=False)
        sender.send(manifest, tensors, lambda update, *, first, last: armed.written())
        clock.mark("send")
        seconds = clock.total()
        own = own or self._own_digests(tensors, wish, sent=True)
        answers = armed.answers()
        self._announcer.finished()
        clock.mark("answer" if wish.resume else "receipt: engine")
        clock.add("send: engine copies", max(rank["seconds"] for rank in answers))
        return _Delivered(answers=answers, own=own, seconds=seconds, armed=True)

    def _deliver_now(self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], clock: PhaseClock, wish: Wish) -> _Delivered:
        try:
            answers, own = self._deliver(manifest, tensors, clock, wish)
        except UnpreparedError:
            # The server was started again, or another trainer published to it, since the last update.
            self._forget()
            with suppress(EngineError):
                self.control.resume()
            answers, own = self._deliver(manifest, tensors, clock, wish)
        reading = max(answer.get("receipt_seconds", 0.0) for answer in answers)
        seconds = clock.total() - reading
        clock.move(reading, "send", "receipt: engine")
        return _Delivered(answers=answers, own=own, seconds=seconds)

    def _deliver(
        self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], clock: PhaseClock, wish: Wish
    ) -> tuple[list[dict[str, Any]], Callable[[], np.ndarray] | None]:
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
            told = self.control.announce(
                manifest,
                update,
                first=first,
                last=last,
                in_flight=wish.in_flight,
                receipt=last and wish.sealed,
                compare=wish.receipt,
                resume=last and wish.resume,
            )
            clock.add("send: engine copies", max(rank["seconds"] for rank in told))
            answers[:] = told

        own = self._own_digests(tensors, wish, sent=False)
        sender.send(manifest, tensors, announce)
        clock.mark("send")
        return answers, own or self._own_digests(tensors, wish, sent=True)

    def _own_digests(self, tensors: Mapping[str, torch.Tensor], wish: Wish, *, sent: bool) -> Callable[[], np.ndarray] | None:
        """Start reading the trainer's own bytes for a receipt, if this is the time: while bytes are under way, or after that where
        nothing but answers waits for it."""
        due = wish.sealed and wish.meanwhile == sent
        return self._comparisons.start(tensors, kept=self._named.keeps(tensors)) if due else None

    def _compare_meanwhile(self, tensors: Mapping[str, torch.Tensor], policy_version: int, own: Callable[[], np.ndarray]) -> PendingReceipt:
        """Compare in another thread, and have the server's answers go once that is done."""
        kept, delivered = self._named.keeps(tensors), time.perf_counter()

        def compare() -> tuple[Manifest, float]:
            proof = self._comparisons.while_generating(tensors, own, policy_version=policy_version, kept=kept)
            return proof, time.perf_counter() - delivered

        self._comparisons.hold_writes(own)
        waited_seconds = time.perf_counter() - delivered
        self._background = self._background or Background()
        return PendingReceipt(self._background.submit(compare), waited_seconds=waited_seconds)

    def settle(self) -> None:
        """Wait for the comparison that the last :meth:`publish` left under way, if it did (``before="answers"``).

        Raises ByteMismatchError or EngineError as :meth:`publish` does, unless ``PublishReport.settled`` has raised it already.
        """
        if (pending := self._pending) is None:
            return
        was_told = pending.was_told
        try:
            pending.result()
        except Exception:
            self._pending = None
            self._forget()
            if not was_told:
                raise
        # still pending after an interrupt: the other thread goes on
        self._pending = None

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
        """See :meth:`UpdateControl.policy_version`; settles, and cancels what :meth:`arm` announced."""
        self.settle()
        self.disarm()
        return self.control.policy_version()

    def close(self) -> None:
        """Release buffers, exported memory and process groups at both ends; the server keeps serving."""
        if self._pending is not None and not self._pending.ends_within(_CLOSE_S):
            # ends the call that it waits in
            self.control.waiting_client.close()
        with suppress(Exception):
            # the server refuses to generate then, and says why
            self.settle()
        self._announcer.forget(_CLOSE_S)
        if self._sender is not None:
            # Memory that the engine has open is not free for the trainer.
            self.control.close_channel()
        self._forget()
        if self._background is not None:
            self._background.close()
            self._background = None
        self._named, self._planned_last = NamedTensors(), None
        self._comparisons.forget()
        self.client.close()
        self.control.waiting_client.close()
