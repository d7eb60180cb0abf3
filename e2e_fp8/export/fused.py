"""Fused Megatron matrices to their Hugging Face parts, rows only, so that FP8 codes and their scale tiles move verbatim.

Megatron's ``linear_qkv`` interleaves by query group: for each of G groups, its q heads, then k, then v, each ``head_dim``
rows. ``linear_fc1`` of a gated block is gate rows, then up rows. A 128x128 tile of the fused matrix belongs to one part
exactly when every part starts on a multiple of 128 rows; the same split is then applied to the scale tiles, whose rows are
128 times fewer. Legend: N out features, K in features, n row tiles.
"""

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


def _rows_by_group(matrix: torch.Tensor, groups: int, queries_per_group: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Split ``[G * (q + 2) * rows, K]`` into q ``[G*q*rows, K]``, k and v ``[G*rows, K]``."""
    columns = matrix.shape[1]
    grouped = matrix.reshape(groups, queries_per_group + 2, rows, columns)
    q = grouped[:, :queries_per_group].reshape(-1, columns)
    k = grouped[:, queries_per_group].reshape(-1, columns)
    v = grouped[:, queries_per_group + 1].reshape(-1, columns)
    return q.contiguous(), k.contiguous(), v.contiguous()


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    """FP8 tensors are moved as uint8: several torch operations are not implemented for FP8 dtypes."""
    return weight.view(torch.uint8) if weight.element_size() == 1 else weight


def split_qkv(fused: Part, *, num_heads: int, num_groups: int, head_dim: int) -> tuple[Part, Part, Part]:
    """Un-interleave ``linear_qkv`` into q, k, v parts.

    Raises:
        ValueError: FP8 rows of a head are not a whole number of 128-row tiles.
    """
    queries = num_heads // num_groups
    weights = _rows_by_group(_bytes(fused.weight), num_groups, queries, head_dim)
    weights = tuple(w.view(fused.weight.dtype) for w in weights)
    if fused.scale_inv is None:
        return tuple(Part(weight=w, scale_inv=None) for w in weights)  # type: ignore[return-value]
    if head_dim % TILE:
        raise ValueError(f"head_dim {head_dim} is not a multiple of {TILE}: q, k and v share FP8 tiles of linear_qkv")
    scales = _rows_by_group(fused.scale_inv, num_groups, queries, head_dim // TILE)
    return tuple(Part(weight=w, scale_inv=s) for w, s in zip(weights, scales, strict=True))  # type: ignore[return-value]


def split_gate_up(fused: Part) -> tuple[Part, Part]:
    """Split ``linear_fc1`` rows into gate and up.

    Raises:
        ValueError: the boundary cuts a 128-row FP8 tile.
    """
    half = fused.weight.shape[0] // 2
    gate_weight, up_weight = fused.weight[:half].contiguous(), fused.weight[half:].contiguous()
    if fused.scale_inv is None:
        return Part(weight=gate_weight, scale_inv=None), Part(weight=up_weight, scale_inv=None)
    if half % TILE:
        raise ValueError(f"gate and up have {half} rows each, not a multiple of {TILE}: they share FP8 tiles of linear_fc1")
    tiles = half // TILE
    return (
        Part(weight=gate_weight, scale_inv=fused.scale_inv[:tiles].contiguous()),
        Part(weight=up_weight, scale_inv=fused.scale_inv[tiles:].contiguous()),
    )
