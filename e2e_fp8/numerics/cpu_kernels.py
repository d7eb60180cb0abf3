"""Compiled loops of the CPU ground, single-threaded and free of the GIL; imported on first use because numba is slow to load.

FP8 conversions are written on the bits, so that no library's rounding, saturation or NaN rule enters. Nothing here is
compiled with fast-math: each product and sum is one IEEE float32 operation.
"""

from typing import Any

import numba
import numpy as np
import torch

from e2e_fp8.numerics.formats import Fp8Format

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_F32_EXPONENT_BIAS = 127
_F32_MANTISSA_BITS = 23
_INF_BITS = 0x7F800000


def _bits(value: float) -> np.int32:
    return np.float32(value).view(np.int32)


def encode_constants(fp8_format: Fp8Format) -> tuple[Any, ...]:
    """What ``_encode`` needs to know of a format, as scalars numba specialises on by type alone.

    ``magic`` is the power of two whose float32 spacing equals the format's subnormal spacing, so adding it rounds there.
    """
    shift = _F32_MANTISSA_BITS - fp8_format.mantissa_bits
    rebias = (_F32_EXPONENT_BIAS - fp8_format.exponent_bias) << fp8_format.mantissa_bits
    magic = np.float32(fp8_format.min_subnormal * 2.0**_F32_MANTISSA_BITS)
    return (
        np.float32(fp8_format.max_value),
        _bits(fp8_format.max_value),
        _bits(fp8_format.min_normal),
        np.int32(shift),
        np.int32((1 << (shift - 1)) - 1),
        np.int32(rebias),
        magic,
        np.int32(fp8_format.nan_code),
    )


@_jit
def _i32(value):
    """Numba widens integer results to 64 bits; every bit pattern here is 32 wide."""
    return np.int32(value)


@_jit
def _f32_of(bits):
    narrow = np.int32(bits)
    return narrow.view(np.float32)


@_jit
def _bits_of(value):
    narrow = np.float32(value)
    return narrow.view(np.int32)


@_jit
def _encode(value, constants):
    """FP8 byte of a float32: round to nearest even, saturate, any NaN to the one NaN code."""
    _, max_bits, min_normal_bits, shift, half, rebias, magic, nan_code = constants
    bits = _bits_of(value)
    sign = _i32(bits >> 24) & 0x80
    magnitude = _i32(bits & 0x7FFFFFFF)
    clamped = min(magnitude, max_bits)
    normal = _i32(_i32(clamped + half + (_i32(clamped >> shift) & 1)) >> shift) - rebias
    subnormal = _bits_of(_f32_of(clamped) + magic) - _bits_of(magic)
    code = sign | (normal if clamped >= min_normal_bits else subnormal)
    return np.uint8(nan_code if magnitude > _INF_BITS else code)


@_jit
def _tile_quant_scale(amax, fmax, overflow, power_2_scale, epsilon):
    """float32 multiplier of one tile."""
    amax = max(amax, epsilon)
    quant_scale = np.float32(1)
    if amax != np.float32(0) and amax != np.float32(np.inf):
        quant_scale = np.float32(fmax / amax)
        if quant_scale == np.float32(np.inf):
            quant_scale = overflow
    if power_2_scale:
        quant_scale = _f32_of(_bits_of(quant_scale) & -0x800000)
    return quant_scale


@_jit
def _quantize(
    x_bits, bits_shift, codes, scale_inv, tile_rows, tile_columns, constants, overflow, power_2_scale, epsilon
):  # pragma: no cover
    """Fill ``codes`` and ``scale_inv``, one strip of ``tile_rows`` rows at a time so that its second reading hits the cache.

    ``x_bits << bits_shift`` are float32 bits: int32 and 0 for float32, uint16 and 16 for bfloat16.
    """
    rows, columns = x_bits.shape
    amax_bits_K = np.empty(columns, np.int32)
    quant_scale_K = np.empty(columns, np.float32)
    for strip in range(scale_inv.shape[0]):
        first, last = strip * tile_rows, min((strip + 1) * tile_rows, rows)
        amax_bits_K[:] = 0
        for row in range(first, last):
            for column in range(columns):
                magnitude = _i32(_i32(x_bits[row, column] << bits_shift) & 0x7FFFFFFF)
                # Non-negative floats order as their bits; a NaN, above infinity in that order, is ignored.
                finite = _i32(0) if magnitude > _INF_BITS else magnitude
                amax_bits_K[column] = max(amax_bits_K[column], finite)
        for tile in range(scale_inv.shape[1]):
            left, right = tile * tile_columns, min((tile + 1) * tile_columns, columns)
            amax = _f32_of(amax_bits_K[left:right].max())
            quant_scale = _tile_quant_scale(amax, constants[0], overflow, power_2_scale, epsilon)
            scale_inv[strip, tile] = np.float32(1) / quant_scale
            quant_scale_K[left:right] = quant_scale
        for row in range(first, last):
            for column in range(columns):
                value = _f32_of(x_bits[row, column] << bits_shift)
                codes[row, column] = _encode(np.float32(value * quant_scale_K[column]), constants)


def quantize(
    x_MK: torch.Tensor, fp8_format: Fp8Format, tile_shape: tuple[int, int], power_2_scale: bool, amax_epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[M, K]`` and float32 ``scale_inv`` of a contiguous float32 or bfloat16 CPU matrix."""
    rows, columns = x_MK.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scale_inv = torch.empty(-(-rows // tile_shape[0]), -(-columns // tile_shape[1]), dtype=torch.float32)
    bits_dtype, bits_shift = (torch.uint16, 16) if x_MK.dtype == torch.bfloat16 else (torch.int32, 0)
    _quantize(
        x_MK.detach().view(bits_dtype).numpy(),
        bits_shift,
        codes.numpy(),
        scale_inv.numpy(),
        tile_shape[0],
        tile_shape[1],
        encode_constants(fp8_format),
        np.float32(torch.finfo(x_MK.dtype).max),
        power_2_scale,
        np.float32(amax_epsilon),
    )
    return codes.view(fp8_format.dtype), scale_inv


@_jit
def _decode(codes, table, out):
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            out[row, column] = table[codes[row, column]]


_tables: dict[tuple[torch.dtype, torch.dtype], np.ndarray] = {}


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of an FP8 CPU matrix (views allowed) as a new contiguous float32 or float64 matrix."""
    key = (codes.dtype, dtype)
    if key not in _tables:
        _tables[key] = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(dtype).numpy()
    out = torch.empty(codes.shape, dtype=dtype)
    _decode(codes.view(torch.uint8).numpy(), _tables[key], out.numpy())
    return out


@_jit
def _add_scaled(total, partial, left, right):
    for row in range(total.shape[0]):
        factor = left[row]
        for column in range(total.shape[1]):
            total[row, column] += np.float32(partial[row, column]) * np.float32(factor * right[column])


def add_scaled(total: torch.Tensor, partial: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += float32(partial) * (left[:, None] * right)`` in float32, in place; ``partial`` is float32 or float64 ``[M, N]``."""
    _add_scaled(total.numpy(), partial.numpy(), left.numpy(), right.numpy())
