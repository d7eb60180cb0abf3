"""The edge of a quantization block and the arithmetic of tiles. The only place that writes 128."""

TILE = 128
"""Edge of a weight quantization block, in rows and in columns."""
TE_COLUMN_MULTIPLE = 4
"""Transformer Engine stores the scales of a weight with their columns rounded up to this; the rest is never read."""


def tiles(size: int) -> int:
    """Blocks that ``size`` rows or columns take, the last one possibly ragged."""
    return -(-size // TILE)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of ``weight_scale_inv`` for a ``[rows, columns]`` weight."""
    return tiles(rows), tiles(columns)


def te_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape in which Transformer Engine stores those scales: a ``[2048, 768]`` weight has 6 columns of scales, stored as 8."""
    return tiles(rows), -(-tiles(columns) // TE_COLUMN_MULTIPLE) * TE_COLUMN_MULTIPLE
