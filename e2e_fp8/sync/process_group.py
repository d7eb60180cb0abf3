"""A process group of trainer and engine ranks outside torch's global one: NCCL on GPUs, gloo on CPUs.

The only place where the ``nccl`` transport depends on the device. Rank 0 is the trainer; it owns the rendezvous.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions, ReduceOp

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.background import in_background
from e2e_fp8.sync.peer_watch import PeerWatch
from e2e_fp8.sync.shared_buffers import device_uuid

_ALIVE = "trainer"
_TELL_S = 2.0
"""How long a rank that leaves tries to say so."""
_ARRIVED = "arrived"
_GIVEN_UP = "given_up"
"""Note of a rank that left before all was sent."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_making_one = threading.Lock()
"""The variable is the process's."""


class BroadcastGroup:
    """Broadcasts of flat byte buffers from rank 0."""

    _left = "The trainer gave the update up, see its message; publish again."

    def __init__(self, store: TCPStore, rank: int, size: int, *, device: torch.device, host: str, timeout_s: float) -> None:
        self._store, self._device = store, device
        self._peers = PeerWatch(self.abort, timeout_s=timeout_s)
        self._met: dict[int | None, Any] = {}
        """Ranks with which a message was begun, None for all, and the greeting, whose tensor NCCL may still write."""
        self._group: Any
        timeout, prefixed = timedelta(seconds=timeout_s), PrefixStore("weights", store)
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            # Before kernels that pack, unpack and digest: they have time while a message is on the wire.
            options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
            # Of Work.wait, which is only asked for what is over, and of an abort; the time limit is the watch's.
            options._timeout = 2 * timeout
            torch.cuda.set_device(device)
            with _without_watchdog():
                self._group = ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            # The default interface is looked up by host name, which may not resolve to an address peers can reach.
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            self._group = ProcessGroupGloo(prefixed, rank, size, options)

    @classmethod
    def listen(cls, host: str, size: int, *, device: torch.device, timeout_s: float) -> tuple[int, Callable[..., Self]]:
        """(port, call that joins as rank 0 and blocks until all ``size`` ranks have). Listens on ``host`` alone.

        The call may be given a ``check``, made now and then while ranks are missing; what it raises ends the wait.
        """
        listener = socket.socket()
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set(_ALIVE, "1")

        def join(check: Callable[[], None] = lambda: None) -> Self:
            deadline, others = time.monotonic() + timeout_s, [f"{_ARRIVED}/{rank}" for rank in range(1, size)]
            while others and not store.check(others):
                check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not all of {size} ranks came within {timeout_s:g} s")
                time.sleep(2e-3)
            return cls(store, 0, size, device=device, host=host, timeout_s=timeout_s)

        return port, join

    @classmethod
    def join(cls, host: str, port: int, rank: int, size: int, *, device: torch.device, timeout_s: float) -> Self:
        """Join the trainer's group from an engine rank."""
        store = TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        store.set(f"{_ARRIVED}/{rank}", "1")
        local = "127.0.0.1" if host == "127.0.0.1" else _address_towards(host, port)
        return cls(store, rank, size, device=device, host=local, timeout_s=timeout_s)

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Start a broadcast of ``buffer`` (uint8) from rank 0 behind earlier ones and the current stream's work; the result is
        for :meth:`order` and :meth:`finish`."""
        options = BroadcastOptions()
        options.rootRank = 0
        return self._begun(lambda message: self._group.broadcast([message], options), buffer, None)

    def _begun(self, start: Callable[[torch.Tensor], Any], message: torch.Tensor, rank: int | None) -> Any:
        """``start`` a message with ``rank``, or with all; both ends alike, since the first has one of no meaning before it."""
        if self._device.type == "cuda" and rank not in self._met:
            self._met[rank] = self._meet(lambda: start(torch.zeros(1, dtype=message.dtype, device=self._device)))
        return start(message)

    def _meet(self, greet: Callable[[], Any]) -> Any:
        """NCCL connects at the first message, for as long as the other end takes to come, and cannot be aborted meanwhile: in a thread,
        which is left behind when the watch or the time limit ends the wait. The first message is ``greet``, so that one that comes too
        late is sent nothing that counts."""

        def connect() -> Any:
            with torch.cuda.device(self._device):
                greeting = greet()
            if self._peers.has_ended:
                self._group.abort()
            return greeting

        connecting = in_background(connect)
        while not connecting.done():
            self._peers.look()
            time.sleep(1e-3)
        return connecting.result()

    def order(self, work: Any) -> None:
        """What the caller does next comes after this broadcast: on a GPU in stream order, on a CPU by waiting for it."""
        if self._device.type == "cuda":
            work.block_current_stream()
        else:
            work.wait()

    def finish(self, work: Any) -> None:
        """Wait until the broadcast is over; on a GPU within :meth:`watched`. Raises EngineError when that or the time limit ends it."""
        if self._device.type == "cuda":
            while not work.is_completed():
                self._peers.look()
                time.sleep(2e-5)
            # one that was aborted or that NCCL gave up counts as completed, too
            self._peers.look()
            self._peers.progress()
        work.wait()

    def watched(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """While messages are under way: what ``check`` raises, called now and then by a thread, ends them and is raised here, see
        :meth:`PeerWatch.during`. On a CPU a lost connection ends them, and nothing is called."""
        return self._peers.during(check) if self._device.type == "cuda" else nullcontext()

    def check_trainer(self) -> None:
        """Raise EngineError when the trainer's process is gone or has left the group."""
        try:
            left = self._store.check([_GIVEN_UP])
        except RuntimeError as error:
            raise EngineError("The trainer died while it sent weights; publish again.") from error
        if left:
            raise EngineError(self._left)

    def give_up(self) -> None:
        """Leave the group; ranks that wait for this one are told."""
        told = in_background(lambda: self._store.set(_GIVEN_UP, "1"))
        # a store whose host was stopped does not answer
        wait([told], _TELL_S)
        self.abort()

    def abort(self) -> None:
        """End outstanding broadcasts and leave the group; the others see an error, never half a message. From any thread."""
        self._peers.end()
        if self._device.type == "cuda":
            self._group.abort()
        else:
            self._group = None


class PairGroup(BroadcastGroup):
    """Messages between any two ranks, one agreement of all, and notes that rank 0 looks for."""

    _left = "Another rank gave the weight transfer up, see its message; the weights are incomplete: transfer again."
    also: Callable[[], None] | None = None
    """Called by :meth:`check_peers`: raises when this rank need not wait any longer."""

    def note(self, name: str) -> None:
        """Leave a note for the others; seen at once, whatever messages are under way."""
        self._store.set(name, "1")

    def has_notes(self, names: list[str]) -> bool:
        """Whether all these notes were left."""
        return self._store.check(names)

    def send(self, buffer: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start sending ``buffer`` (uint8) to ``rank``; call the result before the buffer is written again."""
        return self._started(lambda message: self._group.send([message], rank, 0), buffer, rank)

    def receive(self, buffer: torch.Tensor, rank: int) -> Callable[[], None]:
        """Start receiving the next message of ``rank`` into ``buffer`` (uint8); call the result before it is read."""
        return self._started(lambda message: self._group.recv([message], rank, 0), buffer, rank)

    def smallest(self, values: list[int]) -> list[int]:
        """Of each value (64-bit, signed) the smallest of all ranks. Raises EngineError when a rank is gone."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN  # pyright: ignore[reportAttributeAccessIssue]
        self._started(lambda message: self._group.allreduce([message], options), tensor, None)()
        return tensor.tolist()

    def check_peers(self) -> None:
        """Raise EngineError when what this rank waits for cannot come any more."""
        self.check_trainer()
        if self.also is not None:
            self.also()

    def _started(self, start: Callable[[torch.Tensor], Any], message: torch.Tensor, rank: int | None) -> Callable[[], None]:
        """Start a call of the library; a call that blocks until it is done. Both raise EngineError when it cannot be."""

        def guarded[T](step: Callable[[], T]) -> T:
            try:
                return step()
            except RuntimeError as error:
                who = "A rank" if rank is None else f"Rank {rank}"
                raise EngineError(f"{who} of the weight transfer died or hangs; the weights are incomplete: transfer again.") from error

        work = guarded(lambda: self._begun(start, message, rank))
        return lambda: guarded(lambda: self.finish(work))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group whose broken messages are errors of who waits for them, and of nobody else.

    torch's watchdog would end the process, the engine's as the trainer's, at the first error that NCCL reports: between hosts it does
    when a peer dies.
    """
    with _making_one:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            del os.environ[_BLOCKING_WAIT]
            if before is not None:
                os.environ[_BLOCKING_WAIT] = before


def nccl_device(index: int) -> str:
    """What NCCL takes for one GPU, of which it refuses two ranks in a group: the UUID, with the host that NCCL_HOSTID names, if it does."""
    return ", NCCL_HOSTID ".join(filter(None, [device_uuid(index), os.environ.get("NCCL_HOSTID")]))


def _address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to ``host``."""
    with socket.create_connection((host, port), timeout=10) as probe:
        return probe.getsockname()[0]
