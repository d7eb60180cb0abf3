"""Where a tensor-parallel rank of vLLM keeps its part of each HF tensor.

A rank's model looks like a smaller model: fewer heads, a narrower feed-forward, fewer rows of embeddings. So its slots are
those of :func:`engine_layout` for that smaller model, and its part of an HF tensor starts where the lower ranks' parts end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.formats import TILE
from e2e_fp8.rollout.engine_layout import TensorSlot, engine_layout
from e2e_fp8.sync.engine_receipt import Part

_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this for each rank."""
_VOCAB_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
_KV_MODULES = ("k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """A part of one HF tensor and its place in this rank's parameters."""

    part: Part
    slot: TensorSlot

    def live(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part as a view of this rank's memory; EngineError when vLLM holds it differently."""
        return self.slot.view(parameters)


def rank_layout(config: Mapping[str, Any], rank: int, size: int) -> list[RankSlot]:
    """Parts that rank ``rank`` of ``size`` holds, in layer order.

    Raises EngineError, naming sizes, when a part would cut a head or a 128-row tile of an FP8 weight.
    """
    whole = engine_layout(config)
    if size == 1:
        return [RankSlot(part=Part(name=s.name, start=(0,) * len(s.shape), shape=s.shape), slot=s) for s in whole]
    local = engine_layout(_rank_config(config, size))
    slots = []
    for full, mine in zip(whole, local, strict=True):
        if full.name in _VOCAB_TENSORS:
            slots.append(_vocabulary_part(full, mine, config["vocab_size"], rank, size))
            continue
        copies = 1
        if full.name.split(".")[-2] in _KV_MODULES:
            copies = max(1, size // config["num_key_value_heads"])
        start = tuple(0 if a == b else rank // copies * b for a, b in zip(full.shape, mine.shape, strict=True))
        slots.append(RankSlot(part=Part(name=full.name, start=start, shape=mine.shape), slot=mine))
    return slots


def _rank_config(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    width_field = "moe_intermediate_size" if config["model_type"] == "qwen3_moe" else "intermediate_size"
    width = config[width_field]
    if heads % size or (kv_heads % size and size % kv_heads) or width % size:
        raise EngineError(
            f"{heads} query heads, {kv_heads} key-value heads and {width_field} {width} cannot be split over {size} rollout ranks; "
            "use a size that divides them."
        )
    per_rank = {"query rows": heads // size * head_dim, "key-value rows": max(1, kv_heads // size) * head_dim, width_field: width // size}
    if config.get("quantization_config") is not None:
        cut = [f"{name} {rows}" for name, rows in per_rank.items() if rows % TILE]
        if cut:
            raise EngineError(f"At {size} rollout ranks each would hold {', '.join(cut)}, no multiple of {TILE}: FP8 tiles would be cut.")
    return dict(config) | {
        "num_attention_heads": heads // size,
        "num_key_value_heads": max(1, kv_heads // size),
        width_field: width // size,
        "vocab_size": _vocabulary_rows(config["vocab_size"], size),
    }


def _vocabulary_rows(vocab_size: int, size: int) -> int:
    padded = -(-vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    return -(-padded // size)


def _vocabulary_part(full: TensorSlot, mine: TensorSlot, vocab_size: int, rank: int, size: int) -> RankSlot:
    """The rank's rows of an embedding; the padding rows at the end belong to no token and are never written."""
    rows = _vocabulary_rows(vocab_size, size)
    first = min(rank * rows, vocab_size)
    shape = (min(rows, vocab_size - first), full.shape[1])
    slot = TensorSlot(name=mine.name, shape=shape, dtype=mine.dtype, parameter=mine.parameter)
    return RankSlot(part=Part(name=full.name, start=(first, 0), shape=shape), slot=slot)
