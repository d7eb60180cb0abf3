"""What one rank of vLLM holds of each HF tensor, and whether whole HF tensors can fill it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from e2e_fp8.errors import LayoutError
from e2e_fp8.layout import EngineParallel, MegatronParallel
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import layer_names, verdicts
from e2e_fp8.rollout.engine_layout import TensorSlot, fp8_modules, rank_slots
from e2e_fp8.sync.engine_receipt import Part


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """A part of one HF tensor and its place in this rank's parameters."""

    part: Part
    slot: TensorSlot

    def live(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part as a view of this rank's memory; EngineError when vLLM holds it differently."""
        return self.slot.view(parameters)


def rank_layout(config: Mapping[str, Any], rank: int, size: int, *, expert: bool = False) -> list[RankSlot]:
    """Parts that rank ``rank`` of ``size`` holds, in the order of vLLM's parameters; with ``expert``, experts are dealt out whole.

    Raises LayoutError when a part would cut a head or a 128x128 tile of an FP8 weight.
    """
    parallel = EngineParallel(tensor=size, expert=expert)
    check_whole_tiles(config, parallel)
    return [
        RankSlot(part=Part(name=slot.name, start=start, shape=slot.shape), slot=slot) for start, slot in rank_slots(config, parallel, rank)
    ]


def check_whole_tiles(config: Mapping[str, Any], parallel: EngineParallel) -> None:
    """Raise LayoutError unless every FP8 tile of the engine is a tile of a whole HF tensor."""
    plan = Plan.from_config(config, MegatronParallel(), parallel, qkv_order="engine", spec="local", fp8=fp8_modules(config))
    cut = [one for one in verdicts(plan) if one.verdict != "pass"]
    if cut:
        raise LayoutError(
            f"At {parallel.engine_size} rollout ranks {len(cut)} FP8 parameters cannot take their tiles from whole tensors: "
            + "; ".join(f"{layer_names(one.layers)}{one.parameter}: {one.reasons[0]}" for one in cut[:4])
            + ". Change rollout.tensor_parallel, or ask `e2e-fp8 plan` which sizes work."
        )
