"""The edge of a quantization block and the arithmetic of tiles. The only place that writes 128."""

from collections.abc import Iterator

TILE = 128
"""Edge of a weight quantization block, in rows and in columns."""
TE_COLUMN_MULTIPLE = 4
"""Transformer Engine stores the scales of a weight with their columns rounded up to this; the rest is never read."""


def tiles(size: int) -> int:
    """Blocks that ``size`` rows or columns take, the last one possibly ragged."""
    return -(-size // TILE)


def touched(start: int, size: int) -> int:
    """Blocks that ``size`` rows from row ``start`` on lie in."""
    return (start + size - 1) // TILE - start // TILE + 1


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of ``weight_scale_inv`` for a ``[rows, columns]`` weight."""
    return tiles(rows), tiles(columns)


def tile_pairs(target: int, source: int, size: int) -> Iterator[tuple[int, int, int]]:
    """``(target block, source block, first row in the target)`` for a run of ``size`` rows from ``source`` to ``target``.

    Where both start at the same place within a block, only the first and the last block are given: those between match.
    """
    first, last = target // TILE, (target + size - 1) // TILE
    blocks = sorted({first, last}) if target % TILE == source % TILE else range(first, last + 1)
    for block in blocks:
        start, stop = max(target, block * TILE), min(target + size, (block + 1) * TILE)
        shift = source - target
        for found in range((start + shift) // TILE, (stop - 1 + shift) // TILE + 1):
            yield block, found, max(start, found * TILE - shift)


def te_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape in which Transformer Engine stores those scales: a ``[2048, 768]`` weight has 6 columns of scales, stored as 8."""
    return tiles(rows), -(-tiles(columns) // TE_COLUMN_MULTIPLE) * TE_COLUMN_MULTIPLE
