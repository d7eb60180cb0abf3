"""FP8 formats. The only place that writes 448 and 57344."""

from dataclasses import dataclass

import torch

from e2e_fp8.layout.tiles import TILE as TILE


@dataclass(frozen=True)
class Fp8Format:
    """One 8-bit floating-point format: a sign, ``7 - mantissa_bits`` exponent bits, ``mantissa_bits`` mantissa bits."""

    name: str
    dtype: torch.dtype
    max_value: float
    """Largest finite magnitude."""
    mantissa_bits: int
    exponent_bias: int
    nan_code: int = 0x7F
    """The byte Transformer Engine stores for any NaN."""

    @property
    def min_normal(self) -> float:
        """Smallest normal magnitude."""
        return 2.0 ** (1 - self.exponent_bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive magnitude; half of it rounds to zero (ties to even)."""
        return self.min_normal * 2.0**-self.mantissa_bits


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, mantissa_bits=3, exponent_bias=7)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, mantissa_bits=2, exponent_bias=15)


def fp8_format_of(name: str | torch.dtype | Fp8Format) -> Fp8Format:
    """Format by its configuration name or torch dtype; a format is returned as it is.

    Raises:
        ValueError: unknown name or dtype.
    """
    for candidate in (E4M3, E5M2):
        if name in (candidate, candidate.name, candidate.dtype):
            return candidate
    raise ValueError(f"unknown FP8 format {name!r}; known: e4m3, e5m2")
