"""The trainer's half of a receipt from a server: its own bytes read beside what is sent, and compared with what every engine rank tells."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from e2e_fp8.errors import ByteMismatchError, EngineError
from e2e_fp8.sync.background import in_background
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.engine_receipt import PartTable, RankReceipts, decode_digests
from e2e_fp8.sync.receipt import Manifest

Tensors = Mapping[str, torch.Tensor]


class Comparisons:
    """Of one trainer with one server; what is known of the ranks' parts is kept from sync to sync."""

    def __init__(self, control: UpdateControl, device: torch.device) -> None:
        """``device``: where the trainer's tensors are."""
        self._control, self._device = control, device
        self._tables: dict[str, PartTable] = {}
        self._receipts: RankReceipts | None = None
        self._reading: torch.cuda.Stream | None = None
        """Where a GPU trainer reads its own bytes."""

    @property
    def knows_parts(self) -> bool:
        """Whether the ranks have told which parts they hold of the tensors that come now: one hash of each is enough then."""
        return self._receipts is not None

    def forget(self) -> None:
        """Other tensors come from now on."""
        self._receipts = None

    def start(self, tensors: Tensors, *, kept: bool) -> Callable[[], np.ndarray]:
        """Start reading ``tensors`` as the current stream leaves them; the call of the result waits for their digests.

        On a GPU nothing is waited for here; on a CPU another thread reads. ``kept`` as of :meth:`RankReceipts.expected`.
        """
        receipts = self._receipts
        assert receipts is not None
        if self._device.type != "cuda":
            return in_background(lambda: receipts.expected(tensors, kept=kept)).result
        self._reading = self._reading or torch.cuda.Stream(self._device)
        self._reading.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._reading):
            return receipts.start(tensors, kept=kept)

    def hold_writes(self, own: Callable[[], np.ndarray]) -> None:
        """Have whatever the caller does next to its tensors come after the reading of ``own``: on a GPU in stream order, on a CPU now."""
        if self._reading is None:
            own()
        else:
            torch.cuda.current_stream(self._device).wait_stream(self._reading)

    def proof(
        self,
        tensors: Tensors,
        own: np.ndarray | None,
        answers: Sequence[Mapping[str, Any]],
        *,
        policy_version: int,
        kept: bool,
        beside: bool = False,
    ) -> Manifest:
        """The trainer's manifest, if every rank's answer (``table``, ``seal``) is what its ``own`` digests make of it.

        The first time, and where something differs, whose name is wanted, all digests of every rank are asked for; ``beside`` other
        calls to the server, which may wait for this.

        Raises:
            ByteMismatchError: the server refuses to generate from then on.
            EngineError: the server is gone.
        """
        agreed = None if own is None or self._receipts is None else self._receipts.agreed(own, answers)
        return agreed or self._compared(tensors, own, policy_version=policy_version, kept=kept, beside=beside)

    def while_generating(self, tensors: Tensors, own: Callable[[], np.ndarray], *, policy_version: int, kept: bool) -> Manifest:
        """:meth:`proof` of a server that generates already, whose answers go after it; beside other calls, which may wait for that.

        Errors as of :meth:`proof`; nothing is answered then.
        """
        try:
            digests = own()
            answers = self._control.caller(beside=True).collective("sealed_receipt")
            proof = self.proof(tensors, digests, answers, policy_version=policy_version, kept=kept, beside=True)
            self._control.resume(policy_version, beside=True)
        except ByteMismatchError:
            raise
        except BaseException:
            with suppress(EngineError):
                # else answers would be held until patience ends
                self._control.refuse(f"the bytes of policy version {policy_version} could not be compared", beside=True)
            raise
        return proof

    def _compared(self, tensors: Tensors, own: np.ndarray | None, *, policy_version: int, kept: bool, beside: bool) -> Manifest:
        answers = self._control.caller(beside=beside).collective("receipt", json.dumps(sorted(self._tables)))
        for answer in answers:
            if "parts" in answer:
                table = PartTable.from_json(answer["parts"])
                self._tables[table.digest] = table
        tables = tuple(self._tables[answer["table"]] for answer in answers)
        if self._receipts is None or self._receipts.tables != tables:
            self._receipts, own = RankReceipts(tensors, tables), None
        # where there are digests the trainer may have gone on, and its tensors be others by now
        expected = self._receipts.expected(tensors, kept=kept) if own is None else own
        ranks = [decode_digests(answer["digests"]) for answer in answers]
        try:
            return self._receipts.check(tensors, expected, ranks, policy_version=policy_version)
        except ByteMismatchError:
            self._control.refuse(f"the receipt of policy version {policy_version} failed", beside=beside)
            raise
