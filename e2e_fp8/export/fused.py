"""Fused matrices to their Hugging Face parts, as views: FP8 codes and their scale tiles are neither copied nor changed.

The trainer keeps the rows of ``linear_qkv`` and ``linear_fc1`` in the order in which vLLM stacks them: all q, all k, all v, and
gate, up. A 128x128 tile of the fused matrix belongs to one part exactly when every part has a multiple of 128 rows; the same
split is then applied to the scale tiles, whose rows are 128 times fewer. Legend: N out features, K in features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from e2e_fp8.numerics.formats import TILE


@dataclass(frozen=True, kw_only=True)
class Part:
    """One matrix with its scale tiles, or a high-precision matrix with ``scale_inv`` None."""

    weight: torch.Tensor
    """float8_e4m3fn or bfloat16 ``[N, K]``."""
    scale_inv: torch.Tensor | None
    """float32 ``[ceil(N/128), ceil(K/128)]``."""


def split_rows(fused: Part, rows: Sequence[int]) -> tuple[Part, ...]:
    """Consecutive parts of ``rows`` rows each.

    Raises:
        ValueError: the rows do not add up, or a boundary cuts a 128-row FP8 tile.
    """
    if sum(rows) != fused.weight.shape[0]:
        raise ValueError(f"parts of {list(rows)} rows do not make up {fused.weight.shape[0]} rows")
    weights = fused.weight.split(list(rows))
    if fused.scale_inv is None:
        return tuple(Part(weight=w, scale_inv=None) for w in weights)
    if len(rows) > 1 and any(count % TILE for count in rows):
        raise ValueError(f"parts of {list(rows)} rows are not all multiples of {TILE}: they share FP8 tiles of the fused matrix")
    scales = fused.scale_inv.split([-(-count // TILE) for count in rows])
    return tuple(Part(weight=w, scale_inv=s) for w, s in zip(weights, scales, strict=True))
