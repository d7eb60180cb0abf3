"""Updates announced ahead of time: the request is at the engine's workers and waits there for a flag while the trainer still trains.

What an update needs besides its copies is one HTTP request, one message to vLLM's engine core and the way back, three milliseconds in which
processes wake each other. Announced, they are over before the weights are ready.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.background import in_background
from e2e_fp8.sync.buckets import UpdateManifest
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.flags import TrainerFlags, looks
from e2e_fp8.sync.publish_report import Wish

_TOGETHER_S = 10.0
"""Ranks get one message: those that come so much later than others do not come."""
_FAILURE_S = 5.0
"""How long a rank's own sentence is waited for once it has failed: others may wait for bytes that will not come."""


class ArmedUpdate:
    """One announced update. :meth:`go` once, then :meth:`written` and :meth:`answers`; or :meth:`cancel`."""

    def __init__(self, flags: TrainerFlags, answer: Future, timeout_s: float) -> None:
        """``answer``: of the announcement, at each engine rank."""
        self._flags, self._answer, self._timeout_s = flags, answer, timeout_s

    def go(self) -> bool:
        """Have every rank begin, once all wait for it; False when none will, and nothing was written."""
        first_s: float | None = None
        for _ in looks(self._timeout_s):
            if self._flags.are_ready():
                return self._flags.go()
            now = time.monotonic()
            first_s = now if first_s is None and self._flags.has_ready() else first_s
            if self._answer.done() or (first_s is not None and now > first_s + _TOGETHER_S):
                break
        self._flags.cancel()
        return False

    def written(self) -> None:
        """Wait until every rank holds every byte. Raises EngineError when one of them fails, dies, or takes too long."""
        for _ in looks(self._timeout_s):
            if self._flags.all_done():
                return
            if self._answer.done() or self._flags.has_failed():
                break
        try:
            self._checked(self._answer.result(_FAILURE_S))
        except TimeoutError as error:
            how = "failed" if self._flags.has_failed() else f"did not end within {self._timeout_s:g} s"
            raise EngineError(f"A rank of the rollout engine {how} while it took the weights; see the server's log.") from error

    def answers(self) -> list[dict[str, Any]]:
        """What the ranks answer: see ``WorkerExtension.weight_update``. Raises EngineError as :meth:`written` does."""
        try:
            return self._checked(self._answer.result(self._timeout_s))
        except TimeoutError as error:
            raise EngineError(f"The rollout server wrote the weights and did not say so within {self._timeout_s:g} s.") from error

    @staticmethod
    def _checked(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any("state" not in rank or "disarmed" in rank for rank in ranks):
            raise EngineError("Some ranks of the rollout engine did not begin an update that others did; publish again.")
        return ranks

    def cancel(self, timeout_s: float) -> bool:
        """Have no rank begin, and wait until the engine is free again. Whether it knows this trainer's channel and flags.

        Raises EngineError when the engine is not free within ``timeout_s``.
        """
        self._flags.cancel()
        try:
            return not any(rank.get("unprepared") for rank in self._answer.result(timeout_s))
        except TimeoutError as error:
            raise EngineError(f"The rollout server did not end an announced update within {timeout_s:g} s of its cancellation.") from error
        except EngineError:
            # nothing was written, and what comes next meets the same server
            return False


class UpdateAnnouncer:
    """One trainer's announcements to one server, one at a time."""

    def __init__(self, control: UpdateControl, *, timeout_s: float) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._flags: TrainerFlags | None = None
        self._armed: ArmedUpdate | None = None
        self._key: tuple[int, Wish] | None = None
        """Policy version, and what is asked for."""
        self._tensors: Mapping[str, torch.Tensor] | None = None

    def arm(
        self, manifest: UpdateManifest, tensors: Mapping[str, torch.Tensor], update: dict[str, Any], wish: Wish, *, patience_s: float
    ) -> str:
        """Announce ``update``, all of ``manifest``. Empty, or why nothing was announced.

        Raises EngineError when the server is gone.
        """
        self.cancel()
        flags = self._flags or TrainerFlags(len(self._control.workers))
        if self._flags is None:
            if refusal := self._refusal(flags):
                flags.close()
                return refusal
            self._flags = flags
        word = {"flags": flags.id, "turn": flags.arm(), "patience_s": patience_s}
        what = {"receipt": wish.sealed, "compare": wish.receipt, "resume": wish.resume}
        step = self._control.step(manifest, update, begin=True, finish=True, **what, **word).to_dict()
        client, timeout_s = self._control.waiting_client, patience_s + self._timeout_s
        answer = in_background(lambda: _answered(lambda: client.update(step, pause=wish.in_flight, timeout_s=timeout_s)))
        self._armed, self._tensors = ArmedUpdate(flags, answer, self._timeout_s), tensors
        self._key = manifest.policy_version, wish
        return ""

    def _refusal(self, flags: TrainerFlags) -> str:
        """Have the ranks open the flags; the first one's reason why it cannot."""
        try:
            ranks = self._control.client.collective("open_flags", json.dumps(flags.describe()))
        except BaseException:
            flags.close()
            raise
        flags.unlink()
        return next((rank["refusal"] for rank in ranks if rank["refusal"]), "")

    def soon(self) -> None:
        """The weights are ready in a moment."""
        if self._armed is not None and self._flags is not None:
            self._flags.soon()

    def claimed(self, policy_version: int, wish: Wish, tensors: Mapping[str, torch.Tensor]) -> ArmedUpdate | None:
        """What was announced, if it is this; another announcement is cancelled."""
        if self._armed is not None and ((policy_version, wish) != self._key or tensors is not self._tensors):
            self.cancel()
        return self._armed

    def cancel(self, timeout_s: float | None = None) -> None:
        """Take the announcement back, if there is one: the old weights serve again. Raises EngineError when the engine is not free then."""
        armed, self._armed, self._key, self._tensors = self._armed, None, None, None
        if armed is not None and not armed.cancel(timeout_s or self._timeout_s):
            self._drop_flags()

    def finished(self) -> None:
        """The announced update is over."""
        self._armed = self._key = self._tensors = None

    def forget(self, timeout_s: float | None = None) -> None:
        """The other end may be gone or in an unknown state: the next announcement opens flags again."""
        with suppress(EngineError):
            self.cancel(timeout_s)
        self._drop_flags()

    def _drop_flags(self) -> None:
        if self._flags is not None:
            self._flags.close()
            self._flags = None


def _answered(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except EngineError:
        raise
    except BaseException as error:
        unknown = f"The rollout server answered an announced update in a way that this program does not know ({error!r})."
        raise EngineError(unknown) from error
