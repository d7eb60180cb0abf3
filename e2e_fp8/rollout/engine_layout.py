"""Where vLLM keeps each HF tensor, as views of its live parameters: the torch side of :mod:`e2e_fp8.layout.engine`.

The layout says which rows of which parameter belong to which HF tensor, for any rank. Here every such place becomes a slot, so
that names, shapes and dtypes can be checked before a byte is written, and live bytes can be read back under their HF names.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.layout import EngineParallel, Part, ShardedParameter, engine_shards
from e2e_fp8.layout.engine import scale_name
from e2e_fp8.layout.families import FP8_DTYPE, Fp8Predicate
from e2e_fp8.layout.tiles import TILE, tiles, touched

_DTYPES = {FP8_DTYPE: torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
_FAMILIES = ("qwen3", "qwen3_moe")
"""Those whose tensors vLLM has been seen to hold as the layout says, in runs."""


@dataclass(frozen=True, kw_only=True)
class TensorSlot:
    """One HF tensor, or a rank's part of one, and its place in vLLM's parameters."""

    name: str
    """HF name, e.g. ``model.layers.0.mlp.experts.3.up_proj.weight_scale_inv``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str
    """vLLM parameter that holds it, e.g. ``model.layers.0.mlp.experts.routed_experts.w13_weight_scale_inv``."""
    expert: int | None = None
    """Index into the leading axis of the parameter, for experts."""
    row: int = 0
    """First row within the parameter (of the expert)."""
    fp8: bool = False
    """Part of an FP8 linear layer: a weight in E4M3 or its block scales."""

    def view(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor as a view of ``parameters``, vLLM's live ones.

        Raises EngineError when vLLM holds it under another name, shape or dtype.
        """
        if self.parameter not in parameters:
            raise EngineError(f"vLLM has no parameter {self.parameter}, where {self.name} was expected; the vLLM version is not supported.")
        whole = parameters[self.parameter].detach()
        part = whole if self.expert is None else whole[self.expert]
        part = part[self.row : self.row + self.shape[0]]
        if tuple(part.shape) != self.shape or part.dtype != self.dtype:
            raise EngineError(
                f"vLLM holds {self.name} as {part.dtype} {tuple(part.shape)} (in {self.parameter}), expected {self.dtype} {self.shape}: "
                "it repacked the weights, so their bytes cannot be compared."
            )
        return part


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """config.json of ``model_dir``. Raises EngineError when it is missing or of an unsupported architecture."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise EngineError(f"Rollout model directory {model_dir} has no config.json.")
    config = json.loads(path.read_text())
    check_model_type(config, str(path))
    return config


def check_model_type(config: Mapping[str, Any], where: str) -> None:
    """Raise EngineError, naming ``where`` it came from, for an architecture whose layout was never checked in a run."""
    if config.get("model_type") not in _FAMILIES:
        raise EngineError(f"{where}: model_type {config.get('model_type')!r} is not supported; use {' or '.join(_FAMILIES)}.")


def fp8_modules(config: Mapping[str, Any]) -> Fp8Predicate:
    """Which linear modules an engine with this config.json runs in FP8: none without ``quantization_config``, else those that it
    does not list in ``modules_to_not_convert``."""
    quantization = config.get("quantization_config")
    skipped = frozenset((quantization or {}).get("modules_to_not_convert") or ())
    return lambda module: quantization is not None and module not in skipped


def engine_layout(config: Mapping[str, Any]) -> list[TensorSlot]:
    """Every tensor of a model with this config.json, in the order of vLLM's parameters. Raises LayoutError for sizes that do not fit."""
    return [slot for _, slot in rank_slots(config, EngineParallel(), 0)]


def rank_slots(config: Mapping[str, Any], parallel: EngineParallel, rank: int) -> Iterator[tuple[tuple[int, ...], TensorSlot]]:
    """(first index in each dimension of the whole HF tensor, slot) of everything that one rank holds.

    Raises LayoutError for sizes that do not divide.
    """
    for parameter in engine_shards(config, parallel, rank, fp8=fp8_modules(config)):
        for part in parameter.parts:
            yield from _slots(parameter, part)


def _slots(parameter: ShardedParameter, part: Part) -> Iterator[tuple[tuple[int, ...], TensorSlot]]:
    start = tuple(span[0] for span in (part.rows, part.cols) if span is not None)
    shape = tuple(span[1] - span[0] for span in (part.rows, part.cols) if span is not None)
    yield (
        start,
        TensorSlot(
            name=part.hf_name,
            shape=shape,
            dtype=_DTYPES[parameter.dtype],
            parameter=parameter.name,
            expert=part.expert,
            row=part.row,
            fp8=parameter.fp8,
        ),
    )
    if parameter.fp8:
        yield (
            tuple(first // TILE for first in start),
            TensorSlot(
                name=scale_name(part.hf_name),
                shape=tuple(touched(first, size) for first, size in zip(start, shape, strict=True)),
                dtype=torch.float32,
                parameter=scale_name(parameter.name),
                expert=part.expert,
                row=tiles(part.row),
                fp8=True,
            ),
        )


def check_delivery(layout: list[TensorSlot], delivered: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise EngineError unless ``delivered`` (HF name -> dtype, shape) is exactly the set ``layout`` describes."""
    expected = {slot.name: slot for slot in layout}
    missing = [name for name in expected if name not in delivered]
    unknown = [name for name in delivered if name not in expected]
    if missing or unknown:
        raise EngineError(
            f"Weight update refused, nothing was written: {len(missing)} tensors missing {missing[:4]}, "
            f"{len(unknown)} unexpected {unknown[:4]} (of {len(expected)} expected)."
        )
    for name, (dtype, shape) in delivered.items():
        slot = expected[name]
        if dtype != slot.dtype or shape != slot.shape:
            raise EngineError(
                f"Weight update refused, nothing was written: {name} is {dtype} {shape}, the engine needs {slot.dtype} {slot.shape}."
            )
