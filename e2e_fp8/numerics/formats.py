"""FP8 formats and the block edge. The only place that writes 448, 57344 and 128."""

from dataclasses import dataclass

import torch

TILE = 128
"""Edge of a quantization block, in elements."""


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit floating-point format."""

    name: str
    dtype: torch.dtype
    max_value: float
    """Largest finite magnitude."""
    min_normal: float
    """Smallest normal magnitude."""
    min_subnormal: float
    """Smallest positive magnitude."""


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16)


def fp8_format_of(name: str | Fp8Format) -> Fp8Format:
    """Format by its configuration name; a format is returned as it is.

    Raises:
        ValueError: unknown name.
    """
    if isinstance(name, Fp8Format):
        return name
    for candidate in (E4M3, E5M2):
        if candidate.name == name:
            return candidate
    raise ValueError(f"unknown FP8 format {name!r}; known: e4m3, e5m2")
