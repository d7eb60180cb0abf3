"""Lane sums of digests on the CPU: compiled loops, single-threaded and free of the GIL. Imported on first use."""

import ctypes
from collections.abc import Callable, Sequence

import numba
import numpy as np
import torch

from e2e_fp8.numerics.digest import A_KEY, A_MUL, B_KEY, B_MUL, WORD_BYTES, Rows

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
_A_KEY, _A_MUL0, _A_MUL1 = (np.uint32(c) for c in (A_KEY, *A_MUL))
_B_KEY, _B_MUL0, _B_MUL1 = (np.uint32(c) for c in (B_KEY, *B_MUL))


# Numba widens integer results to 64 bits; the casts after each operation let LLVM narrow and vectorise it again.
@_jit
def _shifted(value, bits):
    return np.uint32(value ^ (value >> np.uint32(bits)))


@_jit
def _lane_a(word, index):
    value = np.uint32(word ^ np.uint32(index * _A_KEY))
    value = np.uint32(_shifted(value, 16) * _A_MUL0)
    value = np.uint32(_shifted(value, 15) * _A_MUL1)
    return _shifted(value, 16)


@_jit
def _lane_b(word, index):
    value = np.uint32(word + np.uint32(index * _B_KEY))
    value = np.uint32(_shifted(value, 16) * _B_MUL0)
    value = np.uint32(_shifted(value, 13) * _B_MUL1)
    return _shifted(value, 16)


@_jit
def _sum_words(words, rows, row_words, row_stride, sums):  # pragma: no cover
    """``words`` uint32 from the first to the last word of a tensor; counts in words. Adds to ``sums`` uint32 ``[2]``."""
    total_a, total_b = np.uint32(0), np.uint32(0)
    for row in range(rows):
        first = np.uint32(row * row_words)
        # A slice of its own, because only then the inner loop is vectorised.
        part = words[row * row_stride : row * row_stride + row_words]
        for column in range(part.size):
            word, index = part[column], np.uint32(first + column)
            total_a = np.uint32(total_a + _lane_a(word, index))
            total_b = np.uint32(total_b + _lane_b(word, index))
    sums[0] = np.uint32(sums[0] + total_a)
    sums[1] = np.uint32(sums[1] + total_b)


@_jit
def _sum_bytes(raw, rows, row_bytes, row_stride, position, sums):  # pragma: no cover
    """As ``_sum_words`` where words are not aligned or cross rows: bytes from ``position``, a multiple of 4, in the tensor."""
    word = np.uint32(0)
    for row in range(rows):
        for column in range(row_bytes):
            word = np.uint32(word | (np.uint32(raw[row * row_stride + column]) << np.uint32(8 * (position % WORD_BYTES))))
            position += 1
            if position % WORD_BYTES == 0 or (row + 1 == rows and column + 1 == row_bytes):
                index = np.uint32((position - 1) // WORD_BYTES)
                sums[0] = np.uint32(sums[0] + _lane_a(word, index))
                sums[1] = np.uint32(sums[1] + _lane_b(word, index))
                word = np.uint32(0)


def prepared_sums(described: Sequence[Rows], device: torch.device) -> Callable[[], Callable[[], np.ndarray]]:
    """As of :mod:`digest_cuda`; on a CPU there is nothing to prepare, and the start does everything."""

    def start() -> Callable[[], np.ndarray]:
        sums = _lane_sums(described)
        return lambda: sums

    return start


def _lane_sums(described: Sequence[Rows]) -> np.ndarray:
    """uint32 ``[len(described), 2]``: the sums of both lanes of each; the memory must be alive."""
    sums = np.zeros((len(described), 2), dtype=np.uint32)
    for tensor, total in zip(described, sums, strict=True):
        if tensor.num_bytes == 0:
            continue
        span = (tensor.rows - 1) * tensor.row_stride + tensor.row_bytes
        raw = np.frombuffer((ctypes.c_uint8 * span).from_address(tensor.address), dtype=np.uint8)
        if tensor.alignment < WORD_BYTES:
            _sum_bytes(raw, tensor.rows, tensor.row_bytes, tensor.row_stride, 0, total)
            continue
        whole = span - span % WORD_BYTES
        if whole:
            row_words, stride_words = tensor.row_bytes // WORD_BYTES, tensor.row_stride // WORD_BYTES
            _sum_words(raw[:whole].view(np.uint32), tensor.rows, row_words, stride_words, total)
        if span > whole:
            # Only a single row can end inside a word.
            _sum_bytes(raw[whole:], 1, span - whole, 0, whole, total)
    return sums
