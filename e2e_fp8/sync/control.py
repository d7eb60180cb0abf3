"""The calls of one weight update to a running server, in the order of its verbs; which bytes travel how is a transport's business."""

import secrets
from contextlib import suppress
from typing import Any

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.buckets import UpdateManifest, UpdateStep
from e2e_fp8.sync.http_client import REFUSE_ROUTE, ServerClient

_CLOSE_S = 10.0
"""A server that hangs must not keep the trainer from ending."""


class UnpreparedError(EngineError):
    """The server knows neither the announced tensors nor this trainer's channel; nothing was written."""


class UpdateControl:
    """One trainer's view of one server: what it has prepared there, and the channel that is open."""

    def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
        """Raises EngineError when the server is not there."""
        self.client = ServerClient(url, token, timeout_s=timeout_s)
        self.waiting_client = ServerClient(url, token, timeout_s=timeout_s)
        """A connection of its own, for what goes on beside other calls, and may be what they wait for."""
        self.workers = self.client.collective("describe_worker")
        """What each engine rank says of itself; see ``WorkerExtension.describe_worker``."""
        self._prepared, self._channel = "", ""

    def prepare(self, manifest: UpdateManifest) -> bool:
        """Have names, shapes and dtypes compared with the model, unless they were the last time; whether a channel is still open.

        Raises EngineError, nothing being written, when they are not the model's.
        """
        if self._prepared == manifest.layout_digest:
            return True
        ranks = self.client.collective("prepare_update", manifest.to_json())
        self._prepared = manifest.layout_digest
        return all(rank["has_channel"] for rank in ranks)

    def open_channel(self, init_info: dict[str, Any]) -> None:
        """Have every engine rank open the receiving end of a transport."""
        self._channel = secrets.token_hex(8)
        self.client.post("/init_weight_transfer_engine", {"init_info": {**init_info, "id": self._channel}})

    def announce(
        self,
        manifest: UpdateManifest,
        update: dict[str, Any],
        *,
        first: bool,
        last: bool,
        in_flight: str,
        receipt: bool = False,
        compare: bool = False,
        resume: bool = False,
    ) -> list[dict[str, Any]]:
        """One step of an update; returns when every engine rank has taken it: what ``WorkerExtension.weight_update`` answers at each.

        With ``receipt`` that has their digests; with ``compare`` only :meth:`resume` with this version lets generation go on. With
        ``resume`` it goes on in the same call; digests are then begun and not told, and answers wait for :meth:`resume`.

        Raises:
            UnpreparedError: the server was started again, or another trainer has published to it.
        """
        patience = {"resume": resume, "patience_s": self.client.timeout_s if resume else 0.0}
        step = self.step(manifest, update, begin=first, finish=last, receipt=receipt, compare=compare, **patience)
        ranks = self.client.update(step.to_dict(), pause=in_flight if first else None)
        if any(rank.get("unprepared") for rank in ranks):
            raise UnpreparedError("The rollout server does not know this update; publish again.")
        return ranks

    def step(self, manifest: UpdateManifest, update: dict[str, Any], **fields: Any) -> UpdateStep:
        """A step of the update over the open channel; ``fields``: the others of :class:`UpdateStep`."""
        where = {"layout": manifest.layout_digest, "policy_version": manifest.policy_version, "channel": self._channel}
        return UpdateStep(**where, update=update, **fields)

    def refuse(self, reason: str, *, beside: bool = False) -> None:
        """Mark the weights as unusable until the next finished update; ``beside`` other calls, which may wait for this one."""
        self.caller(beside=beside).post(REFUSE_ROUTE, {"reason": reason})

    def resume(self, compared: int | None = None, *, beside: bool = False) -> None:
        """Let generation go on, or answers that wait for that; ``compared``: the policy version whose bytes the engine is known to hold,
        which came over the open channel."""
        self.caller(beside=beside).post("/resume" if compared is None else f"/resume?compared={compared}&channel={self._channel}")

    def caller(self, *, beside: bool) -> ServerClient:
        """The connection for a call; ``beside`` others, which may wait for it."""
        return self.waiting_client if beside else self.client

    def forget(self) -> None:
        """The other end may be gone or in an unknown state: the next update prepares again."""
        self._prepared = ""

    def policy_version(self) -> int | None:
        """Version that every engine rank serves, or None while it serves none.

        Raises EngineError when ranks disagree.
        """
        versions = {state["policy_version"] for state in self.client.collective("weight_state")}
        if len(versions) > 1:
            raise EngineError(f"The ranks of {self.client.url} hold policy versions {sorted(map(str, versions))}; publish again.")
        return versions.pop()

    def close_channel(self) -> None:
        """Have the engine let go of this trainer's memory or process group; a dead server is passed over."""
        if self._channel:
            with suppress(EngineError):
                self.client.collective("close_channel", self._channel, timeout_s=_CLOSE_S)
            self._channel = ""
