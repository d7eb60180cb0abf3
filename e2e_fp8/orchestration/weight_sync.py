"""One weight sync: export from the trainer, deliver into the engine, prove the bytes."""

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.export.chunks import by_chunk
from e2e_fp8.export.gather import Source, gather_hf, held_pieces, pieces_of, sources_of
from e2e_fp8.export.hf_checkpoint import write_hf_checkpoint
from e2e_fp8.export.hf_names import to_hf
from e2e_fp8.export.rollout_only import quantize_for_rollout
from e2e_fp8.export.settled import SettledExport
from e2e_fp8.layout import HfTensor, hf_tensors
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.ranks.driver import DrivingEngine
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.rollout.server_engine import ServerEngine
from e2e_fp8.sync.control import UpdateControl
from e2e_fp8.sync.point_to_point import transfer_plan
from e2e_fp8.sync.publish_report import PublishReport
from e2e_fp8.sync.rank_publisher import RankPublisher
from e2e_fp8.sync.receipt import Manifest, ManifestSeries, check_receipt, manifest_of
from e2e_fp8.training.engine import MegatronEngine
from e2e_fp8.types import ExportedTensor


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one sync moved and whether the receipt passed."""

    policy_version: int
    num_bytes: int
    """Bytes copied into the engine; with the ``shared`` transport those of the tensors that are not one storage with the trainer's."""
    seconds: float
    """Export and delivery, until the trainer knows that the engine holds every byte."""
    receipt_seconds: float
    """From the end of delivery until bytes were compared."""
    waited_seconds: float | None = None
    """Of these, the ones for which the trainer waited while the engine could generate already; None: it could not, so all."""
    answer_seconds: float = 0.0
    """The rest, until the trainer knew that the engine generates; a comparison that goes on meanwhile is in neither."""
    armed: bool = False
    """Whether the engine waited for it, see ``WeightPublisher.arm``."""
    receipt: Manifest | None
    """Engine-side manifest, equal to the trainer's; None when the receipt is switched off, and while it is :attr:`pending`."""
    pending: PublishReport | None = None
    """The delivery whose bytes are compared while the engine generates."""

    def settled(self) -> "SyncReport":
        """With the receipt; waits for a comparison under way. Errors as of ``PublishReport.settled``."""
        if self.pending is None:
            return self
        report = self.pending.settled()
        return replace(
            self,
            receipt=report.receipt,
            receipt_seconds=report.receipt_seconds,
            waited_seconds=report.waited_seconds,
            pending=None,
        )

    @property
    def receipt_wait(self) -> float:
        """Seconds for which the trainer waited for the receipt."""
        return self.receipt_seconds if self.waited_seconds is None else self.waited_seconds

    @property
    def receipt_metrics(self) -> dict[str, float]:
        """Metrics of the receipt; empty when nothing was compared."""
        if self.receipt is None or not self.receipt.tensors:
            return {}
        read_bytes = 2 * self.receipt.num_bytes
        return {
            "receipt/passed": 1.0,
            "receipt/tensors": float(len(self.receipt.tensors)),
            "receipt/share_of_sync": self.receipt_wait / max(self.seconds, 1e-9),
            "receipt/seconds": self.receipt_seconds,
            "receipt/gb_per_s": read_bytes / max(self.receipt_seconds, 1e-9) / 1e9,
        }


def exported_tensors(trainer: MegatronEngine, cfg: Config) -> Iterator[ExportedTensor]:
    """HF-named tensors for the rollout engine. With an FP8 trainer these are its own bytes; otherwise see export.rollout_only.

    Of several trainer ranks, rank 0 gets the tensors and the others send theirs: all have to run the iterator to its end, which
    a DrivingEngine makes the others do.

    Raises:
        ByteMismatchError: with a DrivingEngine, see :func:`gathered_by_order`.
    """
    if isinstance(trainer, DrivingEngine):
        tensors: Iterator[ExportedTensor] = iter(gathered_by_order(trainer, cfg))
    else:
        tensors = gathered(trainer, cfg) if trainer.grid.world > 1 else to_hf(trainer.named_local_weights(), cfg.model)
    if cfg.numerics.rollout_precision == "fp8" and cfg.numerics.training_precision == "bf16":
        return quantize_for_rollout(tensors, QuantizationPlan.from_config(cfg))
    return tensors


_SETTLED: "WeakKeyDictionary[MegatronEngine, SettledExport]" = WeakKeyDictionary()


def settled_tensors(trainer: MegatronEngine, cfg: Config) -> Iterable[ExportedTensor]:
    """:func:`exported_tensors`; the same tuple for as long as they are views of the trainer's memory and that does not move."""
    if trainer.grid.world > 1 or cfg.numerics.rollout_precision != cfg.numerics.training_precision:
        return list(exported_tensors(trainer, cfg))
    export = _SETTLED.setdefault(trainer, SettledExport())
    return export.tensors(trainer.weight_addresses(), trainer.named_local_weights(), cfg.model)


def gathered(trainer: MegatronEngine, cfg: Config) -> Iterator[ExportedTensor]:
    """The trainer's weights as whole tensors on rank 0, one at a time."""
    if trainer not in _SOURCES:
        layouts = (trainer.layout_of(rank) for rank in range(trainer.grid.world))
        _SOURCES[trainer] = sources_of(_whole_tensors(trainer), layouts)
    return gather_hf(trainer.named_local_weights(), _whole_tensors(trainer), _SOURCES[trainer], device=trainer.device)


_SOURCES: "WeakKeyDictionary[MegatronEngine, dict[str, list[Source]]]" = WeakKeyDictionary()
"""Which rank sends which rectangle of which tensor: the same at every sync of a job."""


_WHOLE: "WeakKeyDictionary[MegatronEngine, tuple[HfTensor, ...]]" = WeakKeyDictionary()


def _whole_tensors(trainer: MegatronEngine) -> tuple[HfTensor, ...]:
    """The model's tensors, the same at every sync of a job."""
    if trainer not in _WHOLE:
        _WHOLE[trainer] = tuple(hf_tensors(to_hf_config(trainer.cfg.model, None), trainer.is_fp8_module))
    return _WHOLE[trainer]


def gathered_by_order(trainer: DrivingEngine, cfg: Config) -> list[ExportedTensor]:
    """:func:`gathered` on rank 0, which has the others send.

    With ``sync.receipt``, every rank digests all that it holds, replicas included, and rank 0 compares with the same rectangles of the
    whole tensors: the first half of the receipt, whose second half is the engine's digests of the whole tensors.

    Raises:
        ByteMismatchError: the ranks' weights have come apart, or a transfer between them was damaged.
    """
    trainer.start_gathering()
    with trainer.channel.guarded():
        tensors = list(gathered(trainer, cfg))
    if cfg.sync.receipt:
        check_ranks(tensors, [held_digests(trainer), *trainer.held_digests()], policy_version=trainer.policy_version)
    return tensors


def held_digests(trainer: MegatronEngine) -> dict[str, int]:
    """Digest of every rectangle that this rank holds of the whole tensors, BF16 ones too, by ``export.gather.piece_name``."""
    weights, layout = trainer.named_local_weights(), trainer.layout
    return manifest_of(held_pieces(weights, _whole_tensors(trainer), layout, trainer.rank), covered="all").digests


def check_ranks(tensors: Sequence[ExportedTensor], ranks: Sequence[dict[str, int]], *, policy_version: int) -> None:
    """Compare what each rank holds with the whole tensors.

    Raises:
        ByteMismatchError: names ranks and rectangles whose bytes differ.
    """
    names = sorted({name for held in ranks for name in held})
    whole = manifest_of(pieces_of({t.name: t.tensor for t in tensors}, names), covered="all").digests
    found = [f"rank {rank}: {name}" for rank, held in enumerate(ranks) for name in held if held[name] != whole[name]]
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ByteMismatchError(
            f"Before the sync of policy version {policy_version} the trainer's ranks do not hold the bytes that were gathered from them "
            f"({'; '.join(found[:4])}{more}): replicas have come apart or a transfer was damaged. Resume from the last checkpoint."
        )


def sync_weights(trainer: MegatronEngine, rollout: VllmEngine, cfg: Config, scratch: Path) -> SyncReport:
    """Bring the engine to the trainer's policy version.

    Raises:
        ByteMismatchError: the engine's bytes are not the trainer's afterwards.
    """
    started = time.perf_counter()
    tensors = settled_tensors(trainer, cfg)
    num_bytes = _deliver(rollout, tensors, cfg, scratch, trainer.policy_version)
    _device_synchronize(cfg)
    delivered = time.perf_counter()
    receipt = None
    if cfg.sync.receipt:
        receipt = _receipts_of(rollout).of(rollout.read_back(), covered=rollout.covered)
        check_receipt(_receipts_of(trainer).of(tensors, covered=rollout.covered), receipt, policy_version=trainer.policy_version)
    return SyncReport(
        policy_version=trainer.policy_version,
        num_bytes=num_bytes,
        seconds=delivered - started,
        receipt_seconds=time.perf_counter() - delivered,
        receipt=receipt,
    )


_RECEIPTS: "WeakKeyDictionary[object, ManifestSeries]" = WeakKeyDictionary()
"""What the receipts of a trainer or an engine have in common."""


def _receipts_of(side: MegatronEngine | VllmEngine) -> ManifestSeries:
    return _RECEIPTS.setdefault(side, ManifestSeries())


def publish_weights(trainer: MegatronEngine, rollout: ServerEngine | None, cfg: Config) -> SyncReport:
    """:func:`sync_weights` for an engine in another process.

    With ``sync.transport=ranks`` every trainer rank calls this together, ``rollout`` being None on all but rank 0. With
    ``sync.receipt_before=answers`` the report may be pending.

    Raises:
        ByteMismatchError: the bytes at some engine rank are not the trainer's; the server refuses to generate then.
    """
    version = trainer.policy_version
    if cfg.sync.transport == "ranks":
        report = _published_by_ranks(trainer, rollout, cfg)
    else:
        assert rollout is not None
        before = cfg.sync.receipt_before
        report = rollout.publish(settled_tensors(trainer, cfg), policy_version=version, receipt=cfg.sync.receipt, before=before)
    return SyncReport(
        policy_version=report.policy_version,
        num_bytes=report.num_bytes,
        seconds=report.seconds,
        receipt_seconds=report.receipt_seconds,
        answer_seconds=report.answer_seconds,
        armed=report.armed,
        receipt=report.receipt,
        pending=None if report.pending is None else report,
    )


def _published_by_ranks(trainer: MegatronEngine, rollout: ServerEngine | None, cfg: Config) -> PublishReport:
    if isinstance(trainer, DrivingEngine):
        trainer.start_publishing()
        with trainer.channel.guarded():
            return _publish_together(trainer, rollout, cfg)
    return _publish_together(trainer, rollout, cfg)


def _publish_together(trainer: MegatronEngine, rollout: ServerEngine | None, cfg: Config) -> PublishReport:
    """Collective over the trainer's ranks."""
    if trainer not in _RANK_PUBLISHERS:
        _RANK_PUBLISHERS[trainer] = rank_publisher(trainer, cfg, None if rollout is None else rollout.control)
    publisher = _RANK_PUBLISHERS[trainer]
    if rollout is None:
        return publish_shares(trainer, publisher, cfg)
    return rollout.delivered(lambda: publish_shares(trainer, publisher, cfg), trainer.policy_version)


_RANK_PUBLISHERS: "WeakKeyDictionary[MegatronEngine, RankPublisher]" = WeakKeyDictionary()


def rank_publisher(trainer: MegatronEngine, cfg: Config, control: UpdateControl | None) -> RankPublisher:
    """This trainer rank's end of the ``ranks`` transport into the server of ``control``, which rank 0 alone has. Collective."""
    return RankPublisher(
        control,
        transfer_plan(cfg, trainer.grid.world, trainer.ground.spec),
        list(hf_tensors(to_hf_config(cfg.model, None), trainer.is_fp8_module)),
        rank=trainer.rank,
        device=trainer.device,
        timeout_s=cfg.rollout.timeout_s,
        max_bytes=cfg.sync.max_bucket_mib << 20,
    )


def publish_shares(trainer: MegatronEngine, publisher: RankPublisher, cfg: Config) -> PublishReport:
    """Send what this trainer rank holds; collective over the trainer's ranks. Errors as of ``RankPublisher.publish``."""
    tensors, scales = by_chunk(trainer.named_local_weights(), trainer.layout)
    return publisher.publish(tensors, scales, policy_version=trainer.policy_version, receipt=cfg.sync.receipt)


def _deliver(rollout: VllmEngine, tensors: Iterable[ExportedTensor], cfg: Config, scratch: Path, policy_version: int) -> int:
    if cfg.sync.transport != "disk":
        return rollout.update_weights(tensors, policy_version=policy_version)
    shutil.rmtree(scratch, ignore_errors=True)
    write_hf_checkpoint(scratch, tensors, {})
    return rollout.update_weights_from_disk(scratch, policy_version=policy_version)


def _device_synchronize(cfg: Config) -> None:
    if cfg.run.backend == "cuda":
        import torch

        torch.cuda.synchronize()
