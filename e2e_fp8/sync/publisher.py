"""The trainer's side of weight updates into a running ``vllm serve``: usable from any training loop, imports no vLLM.

publisher = WeightPublisher("http://127.0.0.1:8000", token, transport="ipc", device=torch.device("cpu"))
publisher.publish(tensors, policy_version=1)     # raises ByteMismatchError unless the engine holds these bytes
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.errors import ByteMismatchError, ConfigError, EngineError
from e2e_fp8.sync.buckets import UpdateManifest, plan_update
from e2e_fp8.sync.channels import TRANSPORTS, DiskSender, IpcSender, NcclSender, Sender, WriteFolder
from e2e_fp8.sync.engine_receipt import check_ranks, decode_parts
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.receipt import Manifest
from e2e_fp8.types import ExportedTensor


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """One finished update."""

    policy_version: int
    num_bytes: int
    """Bytes of all tensors sent."""
    seconds: float
    """From the first request until the engine had everything, receipt not included."""
    receipt_seconds: float
    receipt: Manifest | None
    """Digests that trainer and every engine rank agree on; None when the receipt was not asked for."""


class WeightPublisher:
    """Delivers complete sets of HF-named tensors into one server and proves that they arrived.

    ``transport``: ``ipc`` (same host; ``device`` is where the tensors are), ``nccl`` (other GPUs or hosts; ``host`` is this
    machine's address, 127.0.0.1 within one), ``disk`` (``folder`` on a shared file system, ``write_folder`` writes a checkpoint).
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        transport: str,
        device: torch.device,
        timeout_s: float = 600.0,
        max_bucket_bytes: int = 256 << 20,
        host: str = "127.0.0.1",
        folder: Path | None = None,
        write_folder: WriteFolder | None = None,
    ) -> None:
        """Raises ConfigError for an unknown transport or a missing folder, EngineError when the server is not there."""
        if transport not in TRANSPORTS:
            raise ConfigError(f"Weight transport {transport!r} does not exist: use one of {', '.join(TRANSPORTS)}.")
        if transport == "disk" and (folder is None or write_folder is None):
            raise ConfigError("The disk transport needs a folder and a function that writes a checkpoint: give folder and write_folder.")
        self.client = ServerClient(url, token, timeout_s=timeout_s)
        self.workers = self.client.collective("describe_worker")
        """What each engine rank says of itself; see ``WorkerExtension.describe_worker``."""
        self._device, self._transport, self._max_bucket_bytes = device, transport, max_bucket_bytes
        self._open = self._opener(transport, host, timeout_s, folder, write_folder)
        self._sender: Sender | None = None

    def _opener(self, transport: str, host: str, timeout_s: float, folder: Path | None, write: WriteFolder | None) -> Callable[[], Sender]:
        if transport == "ipc":
            return lambda: IpcSender(self._device)
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

    def publish(
        self, tensors: Iterable[ExportedTensor], *, policy_version: int, receipt: bool = True, in_flight: str = "wait"
    ) -> PublishReport:
        """Deliver a complete set of weights and compare bytes; generation resumes only after both succeeded.

        Requests in flight finish under the old weights (``in_flight="wait"``) or are cut short (``"abort"``). A call after a
        failed one, here or in a process that was killed, starts over.

        Raises:
            EngineError: the server refuses (names, shapes, dtypes; nothing was written then), dies, or does not answer.
            ByteMismatchError: the engine's bytes are not the given ones; the server keeps refusing to generate.
        """
        named = _named_once(tensors)
        manifest = plan_update(list(named.items()), policy_version=policy_version, max_bytes=self._max_bucket_bytes)
        started = time.perf_counter()
        prepared = self.client.collective("prepare_update", manifest.to_json())
        if not all(rank["has_channel"] for rank in prepared):
            self._forget_channel()  # the server was started again since the last update
        try:
            self._deliver(manifest, named, in_flight)
            delivered = time.perf_counter()
            proof = self._receipt(named, policy_version) if receipt else None
        except BaseException:
            self._forget_channel()
            raise
        self.client.post("/resume")
        return PublishReport(
            policy_version=policy_version,
            num_bytes=manifest.num_bytes,
            seconds=delivered - started,
            receipt_seconds=time.perf_counter() - delivered,
            receipt=proof,
        )

    def _deliver(self, manifest: UpdateManifest, tensors: dict[str, torch.Tensor], in_flight: str) -> None:
        sender = self._sender = self._sender or self._open()
        sender.open(manifest.capacity, lambda info: self.client.post("/init_weight_transfer_engine", {"init_info": info}))
        sender.stage(manifest, tensors)
        self.client.post(f"/pause?mode={in_flight}&clear_cache=true")
        self.client.post("/start_weight_update")

        def announce(update: dict[str, Any]) -> None:
            self.client.post("/update_weights", {"update_info": {"manifest": manifest.digest, "update": update}})

        sender.send(manifest, tensors, announce)
        self.client.post("/finish_weight_update")

    def _receipt(self, tensors: dict[str, torch.Tensor], policy_version: int) -> Manifest:
        ranks = [decode_parts(answer["parts"]) for answer in self.client.collective("receipt")]
        try:
            return check_ranks(tensors, ranks, policy_version=policy_version)
        except ByteMismatchError:
            self.client.collective("refuse_generation", f"the receipt of policy version {policy_version} failed")
            raise

    def _forget_channel(self) -> None:
        """The other end may be gone or in an unknown state; the next update opens a new channel."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def policy_version(self) -> int | None:
        """Version that every engine rank serves, or None while it serves none.

        Raises EngineError when ranks disagree.
        """
        versions = {state["policy_version"] for state in self.client.collective("weight_state")}
        if len(versions) > 1:
            raise EngineError(f"The ranks of {self.client.url} hold policy versions {sorted(map(str, versions))}; publish again.")
        return versions.pop()

    def close(self) -> None:
        """Release buffers and process groups; the server keeps serving."""
        self._forget_channel()


def _named_once(tensors: Iterable[ExportedTensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for entry in tensors:
        if entry.name in named:
            raise EngineError(f"Weight update refused, nothing was written: {entry.name} came twice.")
        named[entry.name] = entry.tensor.detach()
    return named
