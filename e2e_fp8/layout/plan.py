"""The copies that carry a model from trainer ranks to engine ranks: rectangles, for weights and for their scale tiles alike.

A plan is composed lazily. All layers of one kind share a template, so a plan of a thousand-expert model is a few thousand
rectangles; copies of a rank are made when asked for.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from e2e_fp8.layout import engine, megatron
from e2e_fp8.layout.families import FP8_DTYPE, Fp8Predicate, LayerKind, ModelShape, layer_prefix, model_shape
from e2e_fp8.layout.megatron import QkvOrder, Spec
from e2e_fp8.layout.parallel import EngineParallel, EngineRank, MegatronParallel, MegatronRank
from e2e_fp8.layout.shards import Part, Range, ShardedParameter
from e2e_fp8.layout.tiles import TILE, touched

_ITEM_BYTES = {FP8_DTYPE: 1, "bfloat16": 2, "float32": 4}
_SCALE_BYTES = 4
Coordinate = tuple[int, ...]
"""Of a trainer rank in its stage: ``(tensor,)``, or ``(expert, expert_tensor)`` for experts."""


class Copy(NamedTuple):
    """One rectangle from a parameter of a trainer rank into a parameter of an engine rank. A vector has one column."""

    source_rank: int
    chunk: int
    """Virtual pipeline stage of the source."""
    source: str
    source_row: int
    source_col: int
    target_rank: int
    target: str
    expert: int | None
    """Index into the leading axis of a target that stacks experts."""
    target_row: int
    target_col: int
    rows: int
    cols: int
    dtype: str
    """``float8_e4m3fn``, ``float32`` or ``bfloat16``; the same on both sides."""

    @property
    def fp8(self) -> bool:
        """Whether scale tiles go along: from the source's scales into ``<target>_scale_inv``."""
        return self.dtype == FP8_DTYPE

    @property
    def tiles(self) -> tuple[int, int, int, int, int, int]:
        """Scale tiles as ``(source_row, source_col, target_row, target_col, rows, cols)``; right for a plan without straddles."""
        return (
            self.source_row // TILE,
            self.source_col // TILE,
            self.target_row // TILE,
            self.target_col // TILE,
            touched(self.target_row, self.rows),
            touched(self.target_col, self.cols),
        )

    @property
    def nbytes(self) -> int:
        """Bytes moved, scales included."""
        return copy_bytes((self.target_row, self.rows), (self.target_col, self.cols), self.dtype)


@dataclass(frozen=True, slots=True)
class Fill:
    """Rows at the end of an engine parameter that no tensor fills: zeros (a padded vocabulary)."""

    target_rank: int
    target: str
    row: int
    rows: int


@dataclass(slots=True)
class Stencil:
    """A copy within one block: relative names, and every trainer coordinate that holds the source."""

    holders: tuple[Coordinate, ...]
    source: ShardedParameter
    source_row: int
    source_col: int
    target: ShardedParameter
    expert: int | None
    target_row: int
    target_col: int
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """Bytes moved, scales included."""
        return copy_bytes((self.target_row, self.rows), (self.target_col, self.cols), self.target.dtype)


@dataclass(frozen=True, slots=True)
class Holding:
    """One rectangle of an HF tensor on the trainer's side and all coordinates that have it at that place."""

    coordinates: tuple[Coordinate, ...]
    parameter: ShardedParameter
    part: Part


def copy_bytes(rows: tuple[int, int], cols: tuple[int, int], dtype: str) -> int:
    """Bytes of a rectangle, given as ``(start, size)`` in the target, with the scale tiles it lies in under FP8."""
    scales = _SCALE_BYTES * touched(*rows) * touched(*cols) if dtype == FP8_DTYPE else 0
    return rows[1] * cols[1] * _ITEM_BYTES[dtype] + scales


class Plan:
    """All copies from ``train`` ranks to ``rollout`` ranks.

    Every engine element is written once; where several trainer ranks hold the bytes, the one with the target's own number is
    preferred (they share a GPU when colocated), else they take turns. Whether FP8 bytes may pass unchanged is decided by
    ``straddles.verdicts``, not here.
    """

    def __init__(
        self, shape: ModelShape, train: MegatronParallel, rollout: EngineParallel, *, qkv_order: QkvOrder = "megatron", spec: Spec = "te"
    ) -> None:
        """Raises LayoutError when the layers do not divide; nothing is composed yet, and other sizes are checked on the way."""
        self.shape = shape
        self.train, self.rollout = train, rollout
        self.qkv_order: QkvOrder = qkv_order
        self.spec: Spec = spec
        self._home = _homes(shape, train)
        self._holdings: dict[LayerKind, dict[str, list[Holding]]] = {}
        self._stencils: dict[tuple[LayerKind, bool, int], list[Stencil]] = {}
        self._top_held: dict[str, list[Holding]] | None = None
        self._top: dict[int, tuple[list[Stencil], list[Stencil]]] = {}

    @classmethod
    def from_config(
        cls,
        hf_config: Mapping[str, Any],
        train: MegatronParallel,
        rollout: EngineParallel,
        *,
        qkv_order: QkvOrder = "megatron",
        spec: Spec = "te",
        fp8: Fp8Predicate | None = None,
    ) -> "Plan":
        """The plan for the model with this config.json; see ``families.model_shape`` for ``fp8``. Raises LayoutError."""
        shape = model_shape(hf_config, fp8)
        engine.check_expert_ranks(shape, rollout)
        return cls(shape, train, rollout, qkv_order=qkv_order, spec=spec)

    def copies(self, target_rank: int, *, source_rank: int | None = None) -> Iterator[Copy]:
        """Copies into one engine rank, in the order of the engine's parameters; from one trainer rank if ``source_rank`` is given."""
        place = self.rollout.coordinates(target_rank)
        within: dict[int, list[int]] = {}
        for stage, chunk, prefix, hf_prefix, stencils in self._blocks(place):
            if id(stencils) not in within:
                within[id(stencils)] = [self._source_within(one.holders, target_rank) for one in stencils]
            first_rank = stage * self.train.stage_size
            for one, offset in zip(stencils, within[id(stencils)], strict=True):
                rank = first_rank + offset
                if source_rank is None or rank == source_rank:
                    yield Copy(
                        rank,
                        chunk,
                        prefix + one.source.name,
                        one.source_row,
                        one.source_col,
                        target_rank,
                        hf_prefix + one.target.name,
                        one.expert,
                        one.target_row,
                        one.target_col,
                        one.rows,
                        one.cols,
                        one.target.dtype,
                    )

    def targets(self, target_rank: int) -> dict[str, ShardedParameter]:
        """The parameters that ``copies`` writes, by full name: shapes and dtypes; names inside are relative to their block."""
        blocks = self._blocks(self.rollout.coordinates(target_rank))
        return {prefix + one.target.name: one.target for _, _, _, prefix, stencils in blocks for one in stencils}

    def fills(self, target_rank: int) -> list[Fill]:
        """Rows of one engine rank that stay zero."""
        top = engine.top_parameters(self.shape, self.rollout, self.rollout.coordinates(target_rank))
        return [Fill(target_rank, p.name, p.shape[0] - p.padding_rows, p.padding_rows) for p in top if p.padding_rows]

    def totals(self) -> dict[str, int]:
        """``copies`` and ``bytes`` over all engine ranks, and the largest of one rank; from the templates alone."""
        layers = {kind: self.shape.kinds.count(kind) for kind in self.shape.distinct_kinds}
        per_engine = []
        for rank in range(self.rollout.engine_size):
            place = self.rollout.coordinates(rank)
            counted = [(1, stencils) for stencils in self._top_stencils(place.tensor)]
            counted += [(n, stencils) for kind, n in layers.items() for stencils in self._layer_stencils(kind, place)]
            copies = sum(n * len(stencils) for n, stencils in counted)
            per_engine.append((copies, sum(n * sum(one.nbytes for one in stencils) for n, stencils in counted)))
        return {
            "copies": self.rollout.replicas * sum(copies for copies, _ in per_engine),
            "bytes": self.rollout.replicas * sum(size for _, size in per_engine),
            "largest_rank_copies": max(copies for copies, _ in per_engine),
            "largest_rank_bytes": max(size for _, size in per_engine),
        }

    def templates(self) -> Iterator[tuple[LayerKind | None, list[Stencil]]]:
        """Stencils of each block, None being what is outside the layers, for every engine rank that differs in more than which
        experts it has."""
        rollout = self.rollout
        for tensor in range(rollout.tensor):
            yield from ((None, stencils) for stencils in self._top_stencils(tensor))
        for kind in self.shape.distinct_kinds:
            yield from ((kind, self._dense_stencils(kind, tensor)) for tensor in range(rollout.tensor))
            cuts = 1 if rollout.expert else rollout.engine_size
            yield from ((kind, self._expert_stencils(kind, expert)) for expert in range(cuts if kind.moe else 0))

    def _blocks(self, place: EngineRank) -> Iterator[tuple[int, int, str, str, list[Stencil]]]:
        """``(stage, chunk, trainer's prefix, HF and engine prefix, stencils)`` of every block."""
        last_chunk = (self.train.virtual_pipeline or 1) - 1
        first, last = self._top_stencils(place.tensor)
        yield 0, 0, "", "", first
        for layer, kind in enumerate(self.shape.kinds):
            stage, chunk, local = self._home[layer]
            for stencils in self._layer_stencils(kind, place):
                yield stage, chunk, f"decoder.layers.{local}.", layer_prefix(layer), stencils
        yield self.train.pipeline - 1, last_chunk, "", "", last

    def _layer_stencils(self, kind: LayerKind, place: EngineRank) -> Iterator[list[Stencil]]:
        yield self._dense_stencils(kind, place.tensor)
        if kind.moe:
            yield self._expert_stencils(kind, place.expert)

    def _top_stencils(self, tensor: int) -> tuple[list[Stencil], list[Stencil]]:
        """Outside the layers: from the first stage, and from the last."""
        if tensor not in self._top:
            if self._top_held is None:
                self._top_held = self._top_holdings()
            stencils = compose(engine.top_parameters(self.shape, self.rollout, EngineRank(tensor, 0)), self._top_held)
            first = [one for one in stencils if one.source.name.startswith("embedding.")]
            self._top[tensor] = first, [one for one in stencils if not one.source.name.startswith("embedding.")]
        return self._top[tensor]

    def _dense_stencils(self, kind: LayerKind, tensor: int) -> list[Stencil]:
        return self._composed(kind, tensor, EngineRank(tensor, 0), experts=False)

    def _expert_stencils(self, kind: LayerKind, expert: int) -> list[Stencil]:
        return self._composed(kind, expert, EngineRank(0, expert), experts=True)

    def _composed(self, kind: LayerKind, index: int, place: EngineRank, *, experts: bool) -> list[Stencil]:
        key = (kind, experts, index)
        if key not in self._stencils:
            parameters = engine.layer_parameters(self.shape, kind, self.rollout, place, experts=experts)
            self._stencils[key] = compose(parameters, self._layer_holdings(kind))
        return self._stencils[key]

    def _layer_holdings(self, kind: LayerKind) -> dict[str, list[Holding]]:
        if kind not in self._holdings:
            held: list[tuple[Coordinate, ShardedParameter]] = []
            for tensor in range(self.train.tensor):
                place = MegatronRank(tensor, 0, 0, 0)
                held += [((tensor,), p) for p in self._train_parameters(kind, place, experts=False)]
            for expert in range(self.train.expert if kind.moe else 0):
                for expert_tensor in range(self.train.expert_tensor_size):
                    place = MegatronRank(0, 0, expert, expert_tensor)
                    held += [((expert, expert_tensor), p) for p in self._train_parameters(kind, place, experts=True)]
            self._holdings[kind] = holdings(held)
        return self._holdings[kind]

    def _train_parameters(self, kind: LayerKind, place: MegatronRank, *, experts: bool) -> Iterator[ShardedParameter]:
        return megatron.layer_parameters(self.shape, kind, self.train, place, self.qkv_order, self.spec, experts=experts)

    def _top_holdings(self) -> dict[str, list[Holding]]:
        held: list[tuple[Coordinate, ShardedParameter]] = []
        for tensor in range(self.train.tensor):
            first = megatron.top_parameters(self.shape, self.train, MegatronRank(tensor, 0, 0, 0))
            last = megatron.top_parameters(self.shape, self.train, MegatronRank(tensor, self.train.pipeline - 1, 0, 0))
            for one in {p.name: p for p in first + last}.values():
                # a tied head of a last stage repeats the embedding, which is taken from the first
                if not (self.shape.tied and one.name == "output_layer.weight"):
                    held.append(((tensor,), one))
        return holdings(held)

    def _source_within(self, holders: tuple[Coordinate, ...], target_rank: int) -> int:
        """Which rank of the stage sends to ``target_rank``: the one of the same number if it can, else the holders take turns."""
        train, size = self.train, self.train.stage_size
        within = target_rank % size
        place = train.coordinates(within)
        if ((place.tensor,) if len(holders[0]) == 1 else (place.expert, place.expert_tensor)) in holders:
            return within
        chosen = holders[target_rank % len(holders)]
        if len(chosen) == 1:
            first, step = chosen[0], train.tensor
        else:
            first, step = chosen[0] * train.expert_tensor_size + chosen[1], train.expert * train.expert_tensor_size
        return first + step * (target_rank % (size // step))


def holdings(held: Iterable[tuple[Coordinate, ShardedParameter]]) -> dict[str, list[Holding]]:
    """HF name -> its rectangles on the trainer's side; identical rectangles of several coordinates are one holding."""
    found: dict[tuple[str, Range, Range | None], tuple[list[Coordinate], ShardedParameter, Part]] = {}
    for coordinate, parameter in held:
        for part in parameter.parts:
            found.setdefault((part.hf_name, part.rows, part.cols), ([], parameter, part))[0].append(coordinate)
    by_name: dict[str, list[Holding]] = {}
    for (name, _, _), (coordinates, parameter, part) in found.items():
        by_name.setdefault(name, []).append(Holding(tuple(coordinates), parameter, part))
    return by_name


def compose(targets: Iterable[ShardedParameter], held: Mapping[str, list[Holding]]) -> list[Stencil]:
    """Intersections of each target's parts with what is held, neighbours joined, in the order of the target's elements."""
    stencils: list[Stencil] = []
    for target in targets:
        pieces = [one for part in target.parts for holding in held[part.hf_name] if (one := _meet(target, part, holding))]
        pieces.sort(key=lambda one: (one.expert or 0, one.target_col, one.target_row))
        stencils += _join(pieces)
    return stencils


def _meet(target: ShardedParameter, part: Part, holding: Holding) -> Stencil | None:
    source = holding.part
    top, bottom = max(part.rows[0], source.rows[0]), min(part.rows[1], source.rows[1])
    part_cols, source_cols = part.cols or (0, 1), source.cols or (0, 1)
    left, right = max(part_cols[0], source_cols[0]), min(part_cols[1], source_cols[1])
    if top >= bottom or left >= right:
        return None
    return Stencil(
        holders=holding.coordinates,
        source=holding.parameter,
        source_row=source.row + top - source.rows[0],
        source_col=left - source_cols[0],
        target=target,
        expert=part.expert,
        target_row=part.row + top - part.rows[0],
        target_col=left - part_cols[0],
        rows=bottom - top,
        cols=right - left,
    )


def _join(pieces: list[Stencil]) -> Iterator[Stencil]:
    """Vertical neighbours that are neighbours in one source as well become one."""
    last: Stencil | None = None
    for one in pieces:
        if last is not None and _continues(last, one):
            last.rows += one.rows
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _continues(last: Stencil, one: Stencil) -> bool:
    return (
        last.source is one.source
        and last.expert == one.expert
        and (last.target_col, last.source_col, last.cols) == (one.target_col, one.source_col, one.cols)
        and last.target_row + last.rows == one.target_row
        and last.source_row + last.rows == one.source_row
    )


def _homes(shape: ModelShape, train: MegatronParallel) -> list[tuple[int, int, int]]:
    """``(stage, chunk, layer within the chunk)`` of every layer."""
    homes = [(0, 0, 0)] * shape.layers
    for stage in range(train.pipeline):
        for chunk, layers in enumerate(train.stage_layers(stage, shape.layers)):
            for local, layer in enumerate(layers):
                homes[layer] = (stage, chunk, local)
    return homes
