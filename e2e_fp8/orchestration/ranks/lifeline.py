"""The end of the job on every rank as soon as one rank ends, whatever the others wait for.

A collective over NCCL never notices that a rank is gone, one over gloo only where it talks to that very rank. So rank 0 and each other
rank hold a connection on which nothing is said but why the job ends, and a thread at each end reads it: the kernel closes it with
the process, however that ended.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from e2e_fp8.errors import RankError
from e2e_fp8.orchestration.ranks.meeting import AGAIN, LOST_STATUS, note_said, say_why

_GRACE_S = 3.0
"""For the main thread to notice by itself and raise, before the listening thread ends the process."""
_LAST_S = 28.0
"""For a main thread that knows to tidy up; torchrun kills its ranks after 30."""
_BYTES = 2048
"""Of one message; a longer sentence is cut."""
_REGULAR = ""
"""The sentence of a job that ends as it should."""


class Lifeline:
    """This rank's end: to all others on rank 0, else to rank 0."""

    def __init__(self, group: Any) -> None:
        """Start to listen. ``group`` is a gloo group of all ranks that nothing else uses."""
        self._group, self._rank = group, dist.get_rank()
        self.last_wish: Callable[[], None] = lambda: None
        """What is done before the process ends, where the main thread cannot: files only, nothing that talks to other ranks."""
        self._why: str | None = None
        self._lock = threading.Lock()
        self._ended, self._main_knows = threading.Event(), threading.Event()
        self._peers = [0] if self._rank else list(range(1, dist.get_world_size()))
        self._listeners = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in self._peers]
        for listener in self._listeners:
            listener.start()

    def reason(self, patience_s: float) -> str | None:
        """Why the job ends, as soon as a rank has said so or is found gone; None if neither happens in time.

        The main thread calls this when it is about to raise: it has ``_LAST_S`` seconds from then on.
        """
        self._main_knows.set()
        self._ended.wait(patience_s)
        return self._why

    def end(self, sentence: str) -> None:
        """Have every other rank end with ``sentence``, unless they are about to end already. For the main thread, as :meth:`reason`."""
        self._main_knows.set()
        self._spread(sentence, self._peers)

    def close(self) -> None:
        """The regular end, called on all ranks: nobody listens any more, so that the process group can be left."""
        if self._rank == 0:
            for peer in self._peers:
                self._say(peer, _REGULAR)
        for listener in self._listeners:
            listener.join(_LAST_S)

    def _listen(self, peer: int) -> None:
        try:
            sentence = self._hear(peer)
            if sentence != _REGULAR:
                # whoever tells others has told the user
                note_said()
        except RuntimeError:
            sentence = f"Rank {peer} of the trainer is gone: its process ended without a word (killed, crashed or out of memory). {AGAIN}"
        if sentence != _REGULAR:
            self._spread(sentence, [other for other in self._peers if other != peer])
            self._leave()
        elif self._rank:
            self._say(0, _REGULAR)

    def _spread(self, sentence: str, peers: Sequence[int]) -> None:
        with self._lock:
            if self._why is not None:
                return
            self._why = sentence
        self._ended.set()
        for peer in peers:
            self._say(peer, sentence)

    def _leave(self) -> None:
        """End the process once the main thread has, or when it does not."""
        try:
            if self._main_knows.wait(_GRACE_S):
                time.sleep(_LAST_S)
            else:
                say_why(RankError(self._why), self._rank)
                self.last_wish()
        finally:
            os._exit(LOST_STATUS)

    def _say(self, peer: int, sentence: str) -> None:
        payload = torch.zeros(_BYTES, dtype=torch.uint8)
        text = sentence.encode()[:_BYTES]
        if text:
            payload[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        # a peer that is gone needs no telling
        with suppress(RuntimeError):
            dist.send(payload, peer, group=self._group)

    def _hear(self, peer: int) -> str:
        payload = torch.zeros(_BYTES, dtype=torch.uint8)
        dist.recv(payload, peer, group=self._group)
        return payload.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
