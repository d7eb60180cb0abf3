"""The ``ranks`` transport: every trainer rank sends the rows it holds straight to the engine ranks of a running server.

Rank 0 alone talks to the server; all trainer ranks and all engine ranks then meet in one process group, in which
:mod:`e2e_fp8.sync.point_to_point` moves the plan's rectangles. No rank holds more of the model than its own share.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from e2e_fp8.errors import ByteMismatchError, ConfigError, EngineError, UserError
from e2e_fp8.layout.families import HfTensor
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.tiles import scale_shape
from e2e_fp8.numerics.digest import tensor_digests
from e2e_fp8.sync.background import raise_failure
from e2e_fp8.sync.buckets import DTYPES, UpdateManifest, plan_update
from e2e_fp8.sync.control import UnpreparedError, UpdateControl
from e2e_fp8.sync.engine_receipt import decode_digests
from e2e_fp8.sync.point_to_point import send
from e2e_fp8.sync.process_group import PairGroup, nccl_device
from e2e_fp8.sync.publish_report import PhaseClock, PublishReport
from e2e_fp8.sync.receipt import Manifest, TensorRecord, dtype_name
from e2e_fp8.sync.reshard import outgoing, piece_names

CHANNEL = "ranks"
_POLL_S = 2e-3
_SHOWN = 8

NamedTensors = Sequence[Mapping[str, torch.Tensor]]


def announced(tensors: Sequence[HfTensor]) -> UpdateManifest:
    """Names, dtypes and shapes of a complete set, for the server to compare with its model before anything moves."""
    forms: list[tuple[str, torch.Tensor]] = []
    for tensor in tensors:
        forms.append((tensor.name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")))
        if tensor.fp8:
            forms.append((f"{tensor.name}_scale_inv", torch.empty(scale_shape(*tensor.shape), dtype=torch.float32, device="meta")))
    return plan_update(forms, policy_version=0, max_bytes=1 << 62)


class RankPublisher:
    """One trainer rank's end. Every rank of the trainer makes one, and all call :meth:`publish` together.

    ``control`` is the server's, on rank 0, and None elsewhere. With more than one rank torch.distributed has to be running.
    """

    def __init__(
        self,
        control: UpdateControl | None,
        plan: Plan,
        tensors: Sequence[HfTensor],
        *,
        rank: int,
        device: torch.device,
        timeout_s: float = 600.0,
        max_bytes: int = 64 << 20,
        host: str = "127.0.0.1",
    ) -> None:
        """``tensors``: every Hugging Face tensor of the model; ``host``: rank 0's address, for the other ranks and the engine.

        Raises ConfigError, on every rank, when the server's ranks are not those of the plan, or share a GPU with a trainer rank.
        """
        self._control, self._plan, self._rank, self._device = control, plan, rank, device
        self._timeout_s, self._max_bytes, self._host = timeout_s, max_bytes, host
        self._manifest = announced(tensors)
        self._group: PairGroup | None = None
        self._turn = 0
        gpus = self._from_all(nccl_device(device.index or 0) if device.type == "cuda" else "")
        self._on_root(lambda: self._check_server(gpus))

    def _check_server(self, trainer_gpus: Sequence[str]) -> None:
        found, wanted = len(self._root.workers), self._plan.rollout.world_size
        if found != wanted:
            raise ConfigError(
                f"The rollout server has {found} ranks, but the plan sends to {wanted}: set rollout.tensor_parallel to {found}."
            )
        for engine_rank, worker in enumerate(self._root.workers):
            gpu = worker["nccl_device"]
            if gpu and gpu in trainer_gpus:
                raise ConfigError(
                    f"Trainer rank {trainer_gpus.index(gpu)} and rollout rank {engine_rank} share GPU {gpu}, and NCCL refuses two ranks of "
                    "a group on one GPU: with sync.transport=ranks set rollout.server_devices to GPUs that no trainer rank uses, or use "
                    "transport ipc."
                )

    @property
    def _root(self) -> UpdateControl:
        assert self._control is not None
        return self._control

    def _on_root[T](self, step: Callable[[], T]) -> T:
        """What ``step`` returns on rank 0, on every rank; a refusal there is raised everywhere, a bug as an EngineError on the others."""
        box: list[Any] = [None]
        bug = None
        if self._rank == 0:
            try:
                box = [(step(), None)]
            except UserError as error:
                box = [(None, error)]
            except BaseException as error:
                # the others wait for this broadcast
                bug, told = error, f"Rank 0 of the trainer failed in a weight sync with {type(error).__name__}: {error}; see its traceback."
                box = [(None, EngineError(told))]
        if self._plan.train.world_size > 1:
            dist.broadcast_object_list(box, 0)
        value, error = box[0]
        if bug is not None:
            raise bug
        if error is not None:
            raise error
        return value

    def _from_all(self, value: Any) -> list[Any]:
        if self._plan.train.world_size == 1:
            return [value]
        found: list[Any] = [None] * self._plan.train.world_size
        dist.all_gather_object(found, value)
        return found

    def publish(
        self, tensors: NamedTensors, scales: NamedTensors, *, policy_version: int, receipt: bool = True, in_flight: str = "wait"
    ) -> PublishReport:
        """Deliver this rank's shares and compare bytes; collective. Generation resumes only after both succeeded on every rank.

        Args:
            tensors: Megatron's names to this rank's weights, a mapping for each model chunk; see ``export.chunks.by_chunk``.
            scales: the same for the block scales of FP8 weights.

        Raises, on every rank:
            EngineError, LayoutError: the server or a rank refuses or dies; call again to start over.
            ByteMismatchError: the engine's bytes are not the trainer's; the server keeps refusing to generate.
        """
        clock, manifest = PhaseClock(), self._manifest.at_version(policy_version)
        try:
            try:
                num_bytes = self._deliver(manifest, tensors, scales, in_flight, clock, receipt=receipt)
            except UnpreparedError:
                self._forget()
                self._on_root(lambda: _quietly(self._root.resume))
                num_bytes = self._deliver(manifest, tensors, scales, in_flight, clock, receipt=receipt)
            delivered = clock.total()
            proof = self._receipt(tensors, scales, policy_version, clock) if receipt else None
        except BaseException:
            self._forget()
            raise
        compared = clock.total()
        self._on_root(lambda: self._root_resume(policy_version if receipt else None))
        clock.mark("resume")
        return PublishReport(
            policy_version=policy_version,
            num_bytes=num_bytes,
            seconds=delivered,
            receipt_seconds=compared - delivered,
            answer_seconds=clock.total() - compared,
            receipt=proof,
            phases=clock.seconds,
        )

    def _root_resume(self, compared: int | None) -> None:
        self._root.resume(compared)

    def _deliver(
        self, manifest: UpdateManifest, tensors: NamedTensors, scales: NamedTensors, in_flight: str, clock: PhaseClock, *, receipt: bool
    ) -> int:
        if not self._on_root(lambda: self._root.prepare(manifest)):
            self._drop_group()
        clock.mark("prepare")
        group = self._group = self._group or self._joined()
        clock.mark("open")
        self._turn += 1
        with ThreadPoolExecutor(1) as poster:
            posted: Future | None = None
            if self._rank == 0:
                update = {"buckets": list(range(len(manifest.buckets))), "turn": self._turn}
                announce = self._root.announce
                posted = poster.submit(announce, manifest, update, first=True, last=True, in_flight=in_flight, compare=receipt)
            group.also = None if posted is None else lambda: raise_failure(posted)
            try:
                self._on_root(lambda: self._wait_for_engine(posted, group))
                report = send(
                    self._plan,
                    self._rank,
                    tensors,
                    scales,
                    group,
                    device=self._device,
                    policy_version=manifest.policy_version,
                    max_bytes=self._max_bytes,
                )
            except BaseException:
                # Whoever still waits for this rank is told, and the poster ends with the server's own sentence.
                self._drop_group()
                raise
            self._on_root(lambda: None if posted is None else posted.result())
        clock.mark("send")
        return sum(self._from_all(report.num_bytes))

    def _wait_for_engine(self, posted: "Future | None", group: PairGroup) -> None:
        """Until every engine rank has begun to receive; the server's refusal when it answers before that."""
        assert posted is not None
        deadline = time.monotonic() + self._timeout_s
        while not group.has_notes([ready_note(self._turn, rank) for rank in range(self._plan.rollout.world_size)]):
            if posted.done():
                posted.result()
                raise EngineError("The rollout server ended the weight update before its ranks began to receive; publish again.")
            if time.monotonic() > deadline:
                raise EngineError(f"The rollout server's ranks did not begin to receive weights within {self._timeout_s:g} s.")
            time.sleep(_POLL_S)

    def _joined(self) -> PairGroup:
        """The group of all trainer and engine ranks, trainers first."""
        plan, join, place = self._plan, None, None
        size = plan.train.world_size + plan.rollout.world_size
        options: dict[str, Any] = {"device": self._device, "timeout_s": self._timeout_s}
        if self._rank == 0:
            port, join = PairGroup.listen(self._host, size, **options)
            place = {"host": self._host, "port": port, "size": size, "timeout_s": self._timeout_s, "max_bytes": self._max_bytes}
            place |= {"train": asdict(plan.train), "qkv_order": plan.qkv_order, "spec": plan.spec}
        place = self._on_root(lambda: place)
        assert place is not None
        group, failure = None, None
        with ThreadPoolExecutor(1) as poster:
            posted = poster.submit(self._root.open_channel, {"channel": CHANNEL, "parameters": place}) if self._rank == 0 else None
            try:
                if join is None:
                    group = PairGroup.join(self._host, place["port"], self._rank, size, **options)
                else:
                    group = join(lambda: None if posted is None else raise_failure(posted))
            except EngineError as error:
                # its frames would keep the rendezvous open
                failure = error.with_traceback(None)
            except RuntimeError as error:
                failure = EngineError(f"Trainer rank {self._rank} and the rollout engine did not meet in one process group ({error}).")
            # With the rendezvous, which this closes, ends the wait of the others; the server's own sentence says more than theirs.
            join = None
            try:
                self._on_root(lambda: None if posted is None else posted.result())
                for error in self._from_all(failure):
                    if error is not None:
                        raise error
            except BaseException:
                if group is not None:
                    group.give_up()
                raise
        assert group is not None
        return group

    def _receipt(self, tensors: NamedTensors, scales: NamedTensors, policy_version: int, clock: PhaseClock) -> Manifest:
        plan = self._plan
        answers = self._on_root(lambda: [answer.get("pieces", "") for answer in self._root.client.collective("receipt", "[]")])
        clock.mark("receipt: wait for the engine")
        records: dict[str, TensorRecord] = {}
        problems: list[str] = []
        for target, answer in enumerate(answers):
            reported, copies = decode_digests(answer), list(plan.copies(target))
            mine = np.array([copy.source_rank == self._rank for copy in copies for _ in range(1 + copy.fp8)], dtype=bool)
            if len(reported) != len(mine):
                problems.append(f"engine rank {target} reports {len(reported)} pieces of {len(mine)}")
                continue
            own = [copy for copy in copies if copy.source_rank == self._rank]
            pieces = [t for piece in outgoing(own, tensors, scales) for t in (piece.data, piece.scale_inv) if t is not None]
            expected, names = tensor_digests(pieces), [f"{name}@{target}" for copy in own for name in piece_names(copy)]
            fp8 = [copy.fp8 for copy in own for _ in range(1 + copy.fp8)]
            for name, tensor, digest, found, covered in zip(names, pieces, expected, reported[mine].tolist(), fp8, strict=True):
                if digest != found:
                    problems.append(name)
                elif covered:
                    records[name] = TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, digest)
        return self._verdict(records, problems, policy_version, clock)

    def _verdict(self, records: dict[str, TensorRecord], problems: list[str], policy_version: int, clock: PhaseClock) -> Manifest:
        found = self._from_all((records, problems))
        wrong = [name for _, names in found for name in names]
        if wrong:
            self._on_root(lambda: _quietly(lambda: self._root.refuse(f"the receipt of policy version {policy_version} failed")))
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ByteMismatchError(
                f"after the sync of policy version {policy_version}, the bytes of {len(wrong)} pieces in the rollout engine are not the "
                f"trainer's: {', '.join(wrong[:_SHOWN])}{more} (parameter[rows,columns]@engine rank). Run `e2e-fp8 doctor` on both sides."
            )
        clock.mark("receipt: compare")
        return Manifest.of_records({name: record for found_here, _ in found for name, record in found_here.items()}, covered="pieces")

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.give_up()
            self._group = None

    def _forget(self) -> None:
        if self._control is not None:
            self._control.forget()
        self._drop_group()

    def close(self) -> None:
        """Leave the process group at both ends; the server keeps serving. Not collective."""
        if self._control is not None:
            self._control.close_channel()
        self._forget()


def ready_note(turn: int, engine_rank: int) -> str:
    """Under which name an engine rank notes that it has begun to receive the channel's ``turn``-th update."""
    return f"ready/{turn}/{engine_rank}"


def _quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(EngineError):
        call()
