"""May FP8 bytes pass unchanged? For each engine parameter: does every 128x128 tile of the engine lie inside one of the trainer's?

The engine's tiles restart at row 0 of the *stacked local* matrix (``qkv_proj`` of one rank), the trainer's at row 0 of its own
local matrix, a checkpoint's at row 0 of each Hugging Face tensor. A head dimension of 64, or a shard of 192 rows, makes the three
differ. Verdicts:

- ``pass``: engine tiles are whole in the trainer and in a checkpoint.
- ``native``: engine tiles are whole in the trainer, because it quantizes the same stacked local matrix, but cut across tiles of a
  checkpoint: bytes pass from this trainer layout to this engine layout, and no block-FP8 Hugging Face checkpoint can hold them.
- ``refuse``: an engine tile would need two of the trainer's scales, or vLLM or Transformer Engine refuses the shape.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout.families import HfTensor, LayerKind, layer_tensors
from e2e_fp8.layout.megatron import QkvOrder
from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
from e2e_fp8.layout.plan import Plan, Stencil
from e2e_fp8.layout.shards import ShardedParameter
from e2e_fp8.layout.tiles import TILE, tile_pairs

TE_MULTIPLE = 16
"""Transformer Engine's FP8 products need both dimensions of a weight to be multiples of this."""
_SIZES_TRIED = (1, 2, 4, 8, 16, 32)
_DELIVERABLE = ("pass", "native")
Setting = tuple[MegatronParallel, EngineParallel, QkvOrder]
"""What can be changed to make bytes pass."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the bytes of one engine parameter pass, over all ranks and all layers of its kind."""

    parameter: str
    """Relative name within its layer, e.g. ``self_attn.qkv_proj.weight``."""
    layers: tuple[int, ...]
    verdict: Literal["pass", "native", "refuse"]
    refusals: tuple[str, ...] = ()
    """Shapes that vLLM or Transformer Engine refuses."""
    cuts: tuple[str, ...] = ()
    """HF tensors with the rows or columns where a tile of the engine meets two of the trainer."""
    checkpoint_cuts: tuple[str, ...] = ()
    """HF tensors whose own tiles are cut by the engine's."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is not ``pass``, as sentences."""
        cut = "a tile of the engine there would need the scales of two tiles of the trainer"
        if self.verdict == "native":
            return (f"tiles of {', '.join(self.checkpoint_cuts)} are cut: trainer and engine share one grid, a checkpoint cannot hold it",)
        return (*self.refusals, *(f"{place}: {cut}" for place in self.cuts))


def verdicts(plan: Plan) -> list[Verdict]:
    """One verdict for each FP8 parameter of each kind of layer. Experts of a layer are alike, so one is examined.

    Raises LayoutError when the sizes do not divide.
    """
    train = MegatronParallel(tensor=plan.train.tensor, expert_tensor=plan.train.expert_tensor_size)
    small = Plan(replace(plan.shape, experts=min(plan.shape.experts, 1)), train, plan.rollout, qkv_order=plan.qkv_order, spec=plan.spec)
    tensors = {kind: layer_tensors(small.shape, kind) for kind in small.shape.distinct_kinds}
    found: dict[tuple[LayerKind, str], _Findings] = {}
    for kind, stencils in small.templates():
        for target, copies in groupby(stencils, key=lambda one: one.target):
            if kind is not None and target.fp8:
                found.setdefault((kind, target.name), _Findings()).examine(list(copies), tensors[kind], small)
    layers = {kind: tuple(i for i, k in enumerate(plan.shape.kinds) if k == kind) for kind in plan.shape.distinct_kinds}
    return [findings.verdict(name, layers[kind]) for (kind, name), findings in found.items()]


def check(plan: Plan) -> list[Verdict]:
    """The verdicts, if none is ``refuse``.

    Raises:
        LayoutError: the full list of tensors and rows, and parallel sizes that would work.
    """
    found = verdicts(plan)
    if any(one.verdict == "refuse" for one in found):
        raise LayoutError(refusal(found, alternatives(plan)))
    return found


def refusal(found: list[Verdict], working: list[str], *, allowed: Collection[str] = _DELIVERABLE) -> str:
    """One sentence, then every tensor whose verdict is not ``allowed`` with its reasons, then the sizes that would work."""
    refused = [one for one in found if one.verdict not in allowed]
    lines = [f"FP8 bytes cannot pass unchanged into {len(refused)} of {len(found)} kinds of engine parameter:"]
    for one in refused:
        lines += [f"  {layer_names(one.layers)}{one.parameter}: {reason}" for reason in one.reasons]
    lines.append(
        f"These would work: {'; '.join(working)}."
        if working
        else f"No tensor parallel sizes up to {max(_SIZES_TRIED)} work for this model: keep these modules in BF16."
    )
    return "\n".join(lines)


def layer_names(layers: tuple[int, ...]) -> str:
    """``model.layers.{0-2,5}.`` for the layers of one kind."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return "model.layers.{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}."


def alternatives(plan: Plan) -> list[str]:
    """Command-line settings near the plan's under which all bytes pass, ``|`` between choices: those with the fewest changes."""
    working: dict[str, list[str]] = {}
    for train, rollout, order in nearest_settings(plan):
        experts = f" --train-etp {train.expert_tensor_size}" if plan.shape.experts else ""
        whole = " --rollout-ep" if rollout.expert else ""
        rest = f"--train-tp {train.tensor}{experts} --qkv-order {order}{whole} --rollout-tp"
        working.setdefault(rest, []).append(str(rollout.tensor))
    return [f"{rest} {'|'.join(sizes)}" for rest, sizes in working.items()]


def nearest_settings(
    plan: Plan, *, allowed: Collection[str] = _DELIVERABLE, usable: Callable[[Setting], bool] = lambda setting: True
) -> list[Setting]:
    """The ``usable`` settings with the fewest changes to the plan's under which every verdict is ``allowed``."""
    working: list[Setting] = []
    fewest: int | None = None
    for changed, train, rollout, order in _neighbours(plan):
        if fewest is not None and changed > fewest:
            break
        if not usable((train, rollout, order)):
            continue
        try:
            found = verdicts(Plan(plan.shape, train, rollout, qkv_order=order, spec=plan.spec))
        except LayoutError:
            continue
        if all(one.verdict in allowed for one in found):
            fewest = changed
            working.append((train, rollout, order))
    return working


def _neighbours(plan: Plan) -> Iterator[tuple[int, MegatronParallel, EngineParallel, QkvOrder]]:
    """``(settings changed, ...)`` in order of that number."""
    train, rollout, moe = plan.train, plan.rollout, bool(plan.shape.experts)
    orders: tuple[QkvOrder, ...] = ("megatron", "engine")
    sizes = {(size, etp) for size in {*_SIZES_TRIED, train.tensor} for etp in ({1, size, train.expert_tensor_size} if moe else {size})}
    found = []
    for tensor, expert_tensor in sizes:
        for order in orders:
            for size in {*_SIZES_TRIED, rollout.tensor}:
                for expert in {False, True} if moe else {rollout.expert}:
                    changed = (tensor != train.tensor) + (moe and expert_tensor != train.expert_tensor_size) + (order != plan.qkv_order)
                    changed += (size != rollout.tensor) + (expert != rollout.expert)
                    sides = MegatronParallel(tensor=tensor, expert_tensor=expert_tensor), replace(rollout, tensor=size, expert=expert)
                    found.append((changed, *sides, order))
    yield from sorted(found, key=lambda one: (one[0], one[1].tensor, one[1].expert_tensor_size, one[2].tensor, one[2].expert, one[3]))


@dataclass(slots=True)
class _Findings:
    """What stands against one engine parameter, over all of its copies."""

    refusals: dict[str, None] = field(default_factory=dict)
    """Shapes that a side refuses; an ordered set."""
    cuts: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    """(HF tensor, ``rows`` or ``columns``) -> where a tile of the engine meets two of the trainer."""
    checkpoint_cuts: dict[str, None] = field(default_factory=dict)
    """HF tensors whose own tiles are cut by the engine's."""

    def examine(self, stencils: list[Stencil], tensors: Mapping[str, HfTensor], plan: Plan) -> None:
        """Take in all copies into one parameter of one rank."""
        target, owners = stencils[0].target, _Owners()
        for one in stencils:
            for reason in (engine_refusal(target, tensors, plan.rollout), trainer_refusal(one.source) if plan.spec != "local" else None):
                if reason:
                    self.refusals[reason] = None
            source = (one.holders, one.source.name)
            for at in owners.cuts((one.expert, "rows", one.target_col), source, one.target_row, one.source_row, one.rows):
                self._cut(target, "rows", at)
            for at in owners.cuts((one.expert, "columns", one.target_row), source, one.target_col, one.source_col, one.cols):
                self._cut(target, "columns", at)
        self.checkpoint_cuts |= dict.fromkeys(_cut_in_checkpoint(target))

    def _cut(self, target: ShardedParameter, axis: str, at: int) -> None:
        part = next(p for p in target.parts if axis == "columns" or p.row <= at < p.row + p.rows[1] - p.rows[0])
        first = (part.cols or (0, 1))[0] + at if axis == "columns" else part.rows[0] + at - part.row
        self.cuts.setdefault((part.hf_name, axis), set()).add(first)

    def verdict(self, parameter: str, layers: tuple[int, ...]) -> Verdict:
        cuts = tuple(f"{name} at {axis} {_listed(sorted(places))}" for (name, axis), places in self.cuts.items())
        verdict = "refuse" if self.refusals or cuts else "native" if self.checkpoint_cuts else "pass"
        return Verdict(parameter, layers, verdict, tuple(self.refusals), cuts, tuple(self.checkpoint_cuts))


def engine_refusal(target: ShardedParameter, tensors: Mapping[str, HfTensor], rollout: EngineParallel) -> str | None:
    """Why vLLM 0.26 does not build this FP8 parameter; None if it does.

    It asks for 128-wide shares of row-parallel inputs, of unmerged column-parallel outputs and of expert widths. Merged outputs
    (``qkv_proj``, ``gate_up_proj``) are exempt: ``allow_fp8_block_shape_mismatch`` switches the check off. Its activation
    quantizer asks for inputs of whole groups of 128 everywhere.
    """
    rows, columns = target.matrix
    names = {part.hf_name for part in target.parts}
    if len(target.shape) == 3:
        width = columns if len(names) == target.shape[0] else rows // 2
        if width % TILE:
            return f"vLLM refuses experts of {width} rows a rank (not a multiple of {TILE})"
    if columns % TILE:
        return f"vLLM refuses {columns} input columns a rank (not a multiple of {TILE})"
    if len(names) == 1 and rows % TILE and rows < tensors[target.parts[0].hf_name].shape[0]:
        return f"vLLM refuses {rows} output rows a rank (not a multiple of {TILE})"
    return None


def trainer_refusal(source: ShardedParameter) -> str | None:
    """Why Transformer Engine cannot multiply with this FP8 weight; None if it can."""
    if any(size % TE_MULTIPLE for size in source.matrix):
        return f"Transformer Engine refuses {source.name} {list(source.shape)} (not multiples of {TE_MULTIPLE})"
    return None


def _cut_in_checkpoint(target: ShardedParameter) -> Iterator[str]:
    """HF tensors of ``target`` with a tile that shares one of the engine's with another tile, of the same tensor or not."""
    meeting: dict[Hashable, set[tuple[str, int]]] = {}
    for part in target.parts:
        left, right = part.cols or (0, 1)
        for axis, at, first, size in (("rows", part.row, part.rows[0], part.rows[1] - part.rows[0]), ("columns", 0, left, right - left)):
            line = part.row if axis == "columns" else None
            for block, found, _ in tile_pairs(at, first, size):
                meeting.setdefault((part.expert, axis, line, block), set()).add((part.hf_name, found))
    for met in meeting.values():
        if len(met) > 1:
            yield from sorted(name for name, _ in met)


class _Owners:
    """Which source tile each tile of one engine parameter takes its scale from."""

    def __init__(self) -> None:
        self.of: dict[Hashable, Hashable] = {}

    def cuts(self, line: Hashable, matrix: Hashable, target: int, source: int, size: int) -> Iterator[int]:
        """Positions at which a run of rows (or columns) of ``matrix`` brings a second source tile into a tile of ``line``."""
        for block, found, at in tile_pairs(target, source, size):
            if self.of.setdefault((line, block), (matrix, found)) != (matrix, found):
                yield at


def _listed(places: list[int], most: int = 6) -> str:
    """``0, 64, 128`` and how many more."""
    rest = len(places) - most
    return ", ".join(map(str, places[:most])) + (f" and {rest} more" if rest > 0 else "")
