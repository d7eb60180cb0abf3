"""Receipts of the ``ranks`` transport, whose names are rectangles of engine parameters, against whole tensors of a checkpoint."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.errors import LayoutError, UserError
from e2e_fp8.layout import EngineParallel, engine_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.rollout.engine_layout import TensorSlot, fp8_modules, rank_slots
from e2e_fp8.rollout.rank_layout import check_whole_tiles
from e2e_fp8.sync.receipt import Manifest, TensorRecord, manifest_of
from e2e_fp8.types import ExportedTensor

_PIECE = re.compile(r"(?P<parameter>[^\[]+)(?:\[(?P<expert>\d+)\])?\[(?P<rows>\d+:\d+),(?P<cols>\d+:\d+)\]@(?P<rank>\d+)")
_Place = tuple[int, str]
"""Engine rank and parameter."""
_Area = tuple[range, range]
"""Rows and columns of a matrix."""


@dataclass
class _Parameter:
    """One FP8 parameter or its scales at one rank while the checkpoint's tensors come by."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    missing: int = 0
    """Parts that have not come."""
    pieces: list[tuple[str, int | None, _Area]] = field(default_factory=list)
    """Name, expert and place of the receipt's pieces."""
    values: torch.Tensor | None = None


def piece_manifest(table: Manifest, tensors: Iterator[ExportedTensor], cfg: Config) -> tuple[Manifest, int]:
    """The pieces that ``table`` names, cut out of a checkpoint laid out as the engine's ranks hold it.

    Returns them, without those whose tensors the checkpoint lacks, and the number of its tensors that no piece is part of. One parameter
    with all its parts is in memory at a time if the checkpoint is in the order of its layers.

    Raises:
        UserError: the engine's FP8 tiles are those of fused matrices, or a name of the table is no piece of this model.
    """
    config = to_hf_config(cfg.model, QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model))
    parallel = EngineParallel(tensor=cfg.rollout.tensor_parallel, expert=cfg.rollout.expert_parallel)
    try:
        check_whole_tiles(config, parallel)
    except LayoutError as error:
        raise UserError(f"The receipt is of FP8 tiles that no checkpoint holds, so there is nothing to compare. {error}") from error
    parameters, slots = _layout(config, parallel)
    _assign(table, parameters)
    records: dict[str, TensorRecord] = {}
    others = 0
    for entry in tensors:
        taken = slots.pop(entry.name, [])
        others += not taken
        for rank, start, slot in taken:
            parameter = parameters[rank, slot.parameter]
            _fill(parameter, start, slot, entry)
            if not parameter.missing:
                records |= _digested(parameter)
    return Manifest.of_records(records, covered="pieces", rank=table.rank), others


def _layout(
    config: dict[str, Any], parallel: EngineParallel
) -> tuple[dict[_Place, _Parameter], dict[str, list[tuple[int, tuple[int, ...], TensorSlot]]]]:
    """Every FP8 parameter and its scales, and where each HF tensor lies in them."""
    parameters: dict[_Place, _Parameter] = {}
    slots: dict[str, list[tuple[int, tuple[int, ...], TensorSlot]]] = defaultdict(list)
    for rank in range(parallel.world_size):
        for shard in engine_shards(config, parallel, rank, fp8=fp8_modules(config)):
            if shard.fp8:
                parameters[rank, shard.name] = _Parameter(shard.shape, torch.float8_e4m3fn)
                parameters[rank, scale_name(shard.name)] = _Parameter(shard.scale_shape, torch.float32)
        for start, slot in rank_slots(config, parallel, rank):
            if slot.fp8:
                parameters[rank, slot.parameter].missing += 1
                slots[slot.name].append((rank, start, slot))
    return parameters, dict(slots)


def _assign(table: Manifest, parameters: dict[_Place, _Parameter]) -> None:
    """Give every piece to its parameter. Raises UserError unless every element of every parameter is in exactly one piece."""
    for name, record in table.tensors.items():
        match = _PIECE.fullmatch(name)
        place = (int(match["rank"]), match["parameter"]) if match else None
        if match is None or place not in parameters:
            raise UserError(f"The receipt names {name}, which is no piece of this model at these sizes: config.yaml is not that run's.")
        rows, cols = (range(*map(int, match[span].split(":"))) for span in ("rows", "cols"))
        if record.shape != (len(rows), len(cols)):
            raise UserError(f"The receipt has {name} as {list(record.shape)}, which is not what the name says: it was altered.")
        parameters[place].pieces.append((name, None if match["expert"] is None else int(match["expert"]), (rows, cols)))
    wrong = [f"{name}@{rank}" for (rank, name), parameter in parameters.items() if not _is_cut(parameter)]
    if wrong:
        raise UserError(
            f"The receipt's pieces do not make up {len(wrong)} parameters of the engine, {wrong[:4]} among them, each element once: it is "
            "not this model's."
        )


def _is_cut(parameter: _Parameter) -> bool:
    """Whether the pieces of every matrix of the parameter hold each of its elements once."""
    *experts, rows, cols = parameter.shape
    matrices: dict[int | None, list[_Area]] = {expert: [] for expert in (range(experts[0]) if experts else [None])}
    for _, expert, area in parameter.pieces:
        if expert not in matrices:
            return False
        matrices[expert].append(area)
    return all(cuts_exactly(areas, rows, cols) for areas in matrices.values())


def cuts_exactly(areas: Sequence[_Area], rows: int, cols: int) -> bool:
    """Whether every element of a matrix ``[rows, cols]`` is in exactly one of ``areas``, and nothing else is in any."""
    row_edges = sorted({0, rows, *(edge for area, _ in areas for edge in (area.start, area.stop))})
    col_edges = sorted({0, cols, *(edge for _, area in areas for edge in (area.start, area.stop))})
    if (row_edges[-1], col_edges[-1]) != (rows, cols):
        return False
    row_at, col_at = ({edge: index for index, edge in enumerate(edges)} for edges in (row_edges, col_edges))
    # between two edges all elements are in the same pieces, so one count stands for them
    counts = np.zeros((len(row_edges) - 1, len(col_edges) - 1), dtype=np.int64)
    for row, col in areas:
        counts[row_at[row.start] : row_at[row.stop], col_at[col.start] : col_at[col.stop]] += 1
    return bool((counts == 1).all())


def _fill(parameter: _Parameter, start: tuple[int, ...], slot: TensorSlot, entry: ExportedTensor) -> None:
    # whatever else it holds, it is not what the engine held: the pieces stay missing
    if entry.tensor.dim() != len(start) or entry.tensor.dtype != slot.dtype:
        return
    part = entry.tensor[tuple(slice(first, first + size) for first, size in zip(start, slot.shape, strict=True))]
    if tuple(part.shape) != slot.shape:
        return
    if parameter.values is None:
        parameter.values = torch.empty(parameter.shape, dtype=parameter.dtype)
    place = parameter.values if slot.expert is None else parameter.values[slot.expert]
    place[slot.row : slot.row + slot.shape[0]] = part
    parameter.missing -= 1


def _digested(parameter: _Parameter) -> dict[str, TensorRecord]:
    """Records of the parameter's pieces; its memory is let go."""
    assert parameter.values is not None
    pieces = []
    for name, expert, (rows, cols) in parameter.pieces:
        whole = parameter.values if expert is None else parameter.values[expert]
        pieces.append(ExportedTensor(name=name, tensor=whole[rows.start : rows.stop, cols.start : cols.stop]))
    parameter.values = None
    return manifest_of(pieces, covered="all").tensors
