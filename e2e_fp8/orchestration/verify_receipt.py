"""``e2e-fp8 receipt verify``: digests of a checkpoint, recomputed without either engine, against the receipt of a run's step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from e2e_fp8.config.root import Config
from e2e_fp8.errors import CheckpointError, UserError
from e2e_fp8.export.hf_names import to_hf
from e2e_fp8.export.rollout_only import quantize_for_rollout
from e2e_fp8.megatron_names import hf_sources
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.orchestration.checkpoint import CheckpointStore
from e2e_fp8.orchestration.ranks.shares import grid_of, whole_masters
from e2e_fp8.orchestration.receipts import read_records, read_table
from e2e_fp8.orchestration.run_folder import load_run_config
from e2e_fp8.orchestration.verify_pieces import piece_manifest
from e2e_fp8.sync.receipt import Manifest, TensorRecord, differences, is_covered, manifest_of
from e2e_fp8.training.weights import hf_shapes
from e2e_fp8.types import ExportedTensor


@dataclass(frozen=True, kw_only=True)
class RankVerification:
    """One rank's receipt against a checkpoint."""

    record: dict[str, Any]
    """Line of ``receipts.jsonl``."""
    combined: str
    """Digest of the checkpoint's covered tensors."""
    per_tensor: bool
    """Whether the run kept the table, so that differing tensors have names."""
    different: dict[str, str] = field(default_factory=dict)
    """Tensor to what is wrong; empty without a table."""

    @property
    def equal(self) -> bool:
        """Whether the checkpoint holds the bytes of the receipt."""
        return self.combined == self.record["digest"] and not self.different


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The receipts of one step, one for each rank of the engine, against a checkpoint."""

    source: str
    """What was read, in words."""
    ranks: list[RankVerification]
    not_covered: int
    """Tensors of the checkpoint that the receipts say nothing about."""

    @property
    def equal(self) -> bool:
        """Whether all ranks' receipts hold."""
        return all(rank.equal for rank in self.ranks)


def verify(run_dir: Path, step: int, checkpoint: Path | None = None) -> Verification:
    """Compare the receipts of ``step`` with a Hugging Face folder, or with the run's own checkpoint of that step.

    The run's checkpoints hold FP32 master weights; what the engine got is those rounded to BF16 and, for FP8 modules, quantized
    in 128x128 tiles, and that is done again here with ``numerics.blockwise``.

    Raises:
        UserError: no such run, step or checkpoint (names the steps there are), or a file that cannot be read or was altered.
    """
    cfg = load_run_config(run_dir)
    records = _records_of(run_dir, step)
    tables = [read_table(run_dir, record) for record in records]
    if checkpoint is not None:
        tensors, source = _hf_folder(checkpoint), str(checkpoint)
    else:
        tensors, source = _own_checkpoint(run_dir, cfg, step, records[0]["policy_version"])
    if records[0]["covered"] == "pieces":
        return _verify_pieces(records, tables, tensors, source, cfg)
    held = _records_by_tensor(tensors)
    ranks = [_compare(record, table, held) for record, table in zip(records, tables, strict=True)]
    covered = {name for name, t in held.items() if any(is_covered(r["covered"], name, t.dtype) for r in records)}
    return Verification(source=source, ranks=ranks, not_covered=len(held) - len(covered))


def _records_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The last record of each rank of ``step``."""
    records = read_records(run_dir)
    of_step = [r for r in records if r["step"] == step]
    if not of_step:
        steps = sorted({r["step"] for r in records})
        there = f"there are receipts of steps {_ranges(steps)}" if steps else "no sync of that run compared anything"
        raise UserError(f"{run_dir} has no receipt of step {step}: {there}.")
    if any("rank" not in r for r in of_step):
        raise UserError(
            f"The receipts of {run_dir} are of an older version of e2e-fp8, whose digests were others; verify with that version."
        )
    return list({r["rank"]: r for r in of_step}.values())


def _ranges(steps: list[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _records_by_tensor(tensors: Iterator[ExportedTensor]) -> dict[str, TensorRecord]:
    """One tensor in memory at a time."""
    held: dict[str, TensorRecord] = {}
    for entry in tensors:
        if entry.name in held:
            raise CheckpointError(f"The checkpoint holds {entry.name} twice; remove the safetensors files that are not its own.")
        held |= manifest_of([entry], covered="all").tensors
    return held


def _compare(record: dict[str, Any], table: Manifest | None, held: dict[str, TensorRecord]) -> RankVerification:
    covered = {name: tensor for name, tensor in held.items() if is_covered(record["covered"], name, tensor.dtype)}
    actual = Manifest.of_records(covered, covered=record["covered"], rank=record["rank"])
    different = differences(table, actual) if table is not None else {}
    return RankVerification(record=record, combined=actual.combined, per_tensor=table is not None, different=different)


def _verify_pieces(
    records: list[dict[str, Any]], tables: list[Manifest | None], tensors: Iterator[ExportedTensor], source: str, cfg: Config
) -> Verification:
    """A receipt of ``sync.transport=ranks``: one record, whose pieces are of all engine ranks."""
    (record,), (table,) = records, tables
    if table is None:
        raise UserError(
            f"The receipt of step {record['step']} names pieces, as trainer ranks sent them (sync.transport=ranks), and the run kept no "
            "table of that step that says which: verify a step that has a checkpoint, or the last one."
        )
    actual, others = piece_manifest(table, tensors, cfg)
    rank = RankVerification(record=record, combined=actual.combined, per_tensor=True, different=differences(table, actual))
    return Verification(source=source, ranks=[rank], not_covered=others)


def _hf_folder(folder: Path) -> Iterator[ExportedTensor]:
    """Every tensor of the safetensors files of ``folder``."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors files; give the folder of a Hugging Face checkpoint.")
    return _read_shards(files)


def _read_shards(files: list[Path]) -> Iterator[ExportedTensor]:
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    yield ExportedTensor(name=name, tensor=file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch or export it again.") from error


def _own_checkpoint(run_dir: Path, cfg: Config, step: int, policy_version: int) -> tuple[Iterator[ExportedTensor], str]:
    folder = run_dir / "checkpoints"
    store = CheckpointStore(folder, keep=cfg.run.keep_checkpoints) if folder.is_dir() else None
    steps = store.steps() if store is not None else []
    if store is None or step not in steps:
        there = f"it has those of steps {_ranges(steps)}" if steps else "it has none"
        raise UserError(
            f"{run_dir} has no checkpoint of step {step} to compare with ({there}); name an exported one with --checkpoint DIR."
        )
    state = store.load(step)
    trainer = state["trainer"]
    if trainer["policy_version"] != policy_version:
        raise UserError(
            f"The checkpoint of step {step} holds policy version {trainer['policy_version']}, but the receipt is of version "
            f"{policy_version}: the two files are not of one run."
        )
    if grid_of(state).world > 1:
        whole = whole_masters(store, step, state, cfg)
        tensors = _delivered((ExportedTensor(name=name, tensor=master.to(torch.bfloat16)) for name, master in whole.items()), cfg)
    else:
        tensors = delivered_from_masters({name: entry["master"] for name, entry in trainer["parameters"].items()}, cfg)
    return tensors, f"{folder}/step_{step:08d}, its FP32 masters rounded to BF16 and quantized"


def delivered_from_masters(masters: dict[str, torch.Tensor], cfg: Config) -> Iterator[ExportedTensor]:
    """HF-named tensors as they were delivered, from flat FP32 masters by Megatron name."""
    shapes = dict(hf_shapes(cfg.model))

    def weights() -> Iterator[tuple[str, torch.Tensor, None]]:
        for name, master in masters.items():
            parts = [shapes[source] for source in hf_sources(name)]
            yield name, master.to(torch.bfloat16).view(sum(part[0] for part in parts), *parts[0][1:]), None

    return _delivered(to_hf(weights(), cfg.model), cfg)


def _delivered(tensors: Iterator[ExportedTensor], cfg: Config) -> Iterator[ExportedTensor]:
    """BF16 tensors as the engine gets them."""
    return quantize_for_rollout(tensors, QuantizationPlan.from_config(cfg)) if cfg.numerics.rollout_precision == "fp8" else tensors
