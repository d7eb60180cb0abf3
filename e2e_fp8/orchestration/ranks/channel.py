"""Orders of rank 0 to the trainer's other ranks, and their answers: JSON and plain tensors over gloo, nothing is unpickled."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.errors import RankError, UserError
from e2e_fp8.orchestration.ranks.lifeline import Lifeline
from e2e_fp8.orchestration.ranks.meeting import AGAIN, reason_of, say_why
from e2e_fp8.types import PackedBatch

_PATIENCE = timedelta(days=30)
"""Ranks wait for orders as long as a rollout takes; one that dies closes its connections and is noticed at once."""
_LOST_PEER = re.compile(r"connection (closed|reset|refused)|broken pipe|socket|timed? ?out|gloo|nccl|peer", re.IGNORECASE)
_GONE = f"A rank of the trainer ended or cannot be reached; what it said itself, if anything, is above. {AGAIN}"
_NAMING_S = 3.0
"""For the lifeline to say which rank is gone, after a call has failed because one is."""
Order = dict[str, Any]


class RankChannel:
    """One process group of all ranks, for orders and answers only."""

    def __init__(self) -> None:
        """Collective. Raises RankError when a rank is gone."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_broken = False
        """An exception left a collective half done, so that nothing more can be said."""
        try:
            self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self.lifeline = Lifeline(dist.new_group(backend="gloo", timeout=_PATIENCE))
        except RuntimeError as error:
            raise RankError(_GONE) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around whatever talks to other ranks.

        Raises:
            RankError: a rank is gone, now or at an earlier call; which one, or what it said.
        """
        if self.is_broken:
            raise self._lost()
        try:
            yield
        except BaseException as error:
            self.is_broken = True
            if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or _LOST_PEER.search(str(error))):
                raise self._lost() from error
            raise

    def _lost(self) -> RankError:
        return RankError(self.lifeline.reason(_NAMING_S) or _GONE)

    def part(self, error: BaseException) -> None:
        """This rank ends because of ``error``: say so, once for all ranks, and have the others end with the same sentence."""
        self.is_broken = True
        say_why(error, self.rank)
        if isinstance(error, RankError):
            # whoever is gone is known on rank 0, or about to be
            self.lifeline.reason(0.0)
        else:
            self.lifeline.end(f"Rank {self.rank}: {error}" if isinstance(error, UserError) else reason_of(error, self.rank))

    def close(self) -> None:
        """The regular end, on all ranks."""
        self.lifeline.close()

    def tell(self, order: Order, tensors: Sequence[torch.Tensor] = ()) -> None:
        """From rank 0 to all others."""
        payload = _packed(order, tensors)
        with self.guarded():
            dist.broadcast(torch.tensor(payload.numel()), 0, group=self._group)
            dist.broadcast(payload, 0, group=self._group)

    def hear(self) -> tuple[Order, list[torch.Tensor]]:
        """The next order of rank 0; its tensors are on the CPU."""
        size = torch.tensor(0)
        with self.guarded():
            dist.broadcast(size, 0, group=self._group)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self._group)
        return _unpacked(payload)

    def answer(self, order: Order, tensors: Sequence[torch.Tensor] = ()) -> None:
        """From another rank to rank 0, which has to ask for it with :meth:`ask`."""
        payload = _packed(order, tensors)
        with self.guarded():
            dist.send(torch.tensor(payload.numel()), 0, group=self._group)
            dist.send(payload, 0, group=self._group)

    def ask(self, rank: int) -> tuple[Order, list[torch.Tensor]]:
        """The answer of one other rank."""
        size = torch.tensor(0)
        with self.guarded():
            dist.recv(size, rank, group=self._group)
            payload = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(payload, rank, group=self._group)
        return _unpacked(payload)

    def ask_all(self) -> list[Order]:
        """Answers of ranks 1, 2, ...

        Raises:
            UserError: of the class and with the sentence of the first rank that answered with one.
        """
        answers = [self.ask(rank)[0] for rank in range(1, self.world)]
        for rank, answer in enumerate(answers, start=1):
            if "error" in answer:
                raise _error_class(answer["kind"])(f"Rank {rank}: {answer['error']}")
        return answers


def refusal(error: UserError) -> Order:
    """An answer that :meth:`RankChannel.ask_all` raises on rank 0."""
    return {"error": str(error), "kind": type(error).__name__}


def _error_class(name: str) -> type[UserError]:
    return next((kind for kind in UserError.__subclasses__() if kind.__name__ == name), UserError)


def _packed(order: Order, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """uint8: length of the header (8 bytes), header (JSON), bytes of the tensors."""
    kinds = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    header = json.dumps({"order": order, "tensors": kinds}).encode()
    head = torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8)
    return torch.cat([head, *(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors)])


def _unpacked(payload: torch.Tensor) -> tuple[Order, list[torch.Tensor]]:
    start = 8 + int.from_bytes(payload[:8].numpy().tobytes(), "little")
    head = json.loads(payload[8:start].numpy().tobytes())
    tensors = []
    for name, shape in head["tensors"]:
        dtype: torch.dtype = getattr(torch, name)
        stop = start + math.prod(shape) * dtype.itemsize
        # cloned: a view at an odd byte cannot be read as wider elements
        tensors.append(payload[start:stop].clone().view(dtype).view(shape))
        start = stop
    return head["order"], tensors


def batch_tensors(batches: Sequence[PackedBatch]) -> tuple[list[list[str]], list[torch.Tensor]]:
    """For each micro-batch the names of the fields it has, and the tensors of all."""
    names = [[f.name for f in fields(b) if getattr(b, f.name) is not None] for b in batches]
    return names, [getattr(b, name) for b, present in zip(batches, names, strict=True) for name in present]


def batches_from(names: Sequence[Sequence[str]], tensors: Sequence[torch.Tensor]) -> list[PackedBatch]:
    """Inverse of :func:`batch_tensors`."""
    left = iter(tensors)
    return [PackedBatch(**{name: next(left) for name in present}) for present in names]
