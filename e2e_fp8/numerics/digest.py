"""Order-sensitive 64-bit digests of tensor bytes, equal on CPU and CUDA and for every view of the same values.

Definition. The bytes of a tensor in row-major order, zero padded, are 32-bit little-endian words ``w[i]``. In wrapping 32-bit
arithmetic each word is mixed with its position in two lanes::

    a = w[i] ^ (i * A_KEY)             b = w[i] + i * B_KEY
    a = (a ^ a >> 16) * A_MUL[0]       b = (b ^ b >> 16) * B_MUL[0]
    a = (a ^ a >> 15) * A_MUL[1]       b = (b ^ b >> 13) * B_MUL[1]
    a =  a ^ a >> 16                   b =  b ^ b >> 16

and ``digest = sum(a) + 2**32 * sum(b) + num_bytes * LENGTH_MUL``, sums modulo 2**32 each, the whole modulo 2**64. Dtype and shape
do not enter. Sums of integers have no order, so that any number of blocks may add up in any order to the same digest.

Why. For a fixed position each lane is a bijection of the word (xor or addition, odd multiplications, xor-shifts): a change
within one word changes both sums for certain. The position enters before the mixing, so exchanged words are two changed
words. Changes of several words have to cancel in both lanes, whose keys and multipliers are unrelated: 2**-64 for unrelated
bytes. The least favourable change that was looked for, one and the same bit flipped in two words, cancels in a lane up to 18 times
as often as chance and never did in both (30 patterns, 2**41 pairs of words each): were the lanes independent, once in 2**55. This
guards against faults, not against forgery.

Integer multiplications of 32 bits, xors and shifts are what a GPU does at full rate in full width, unlike 64-bit products: a
word costs about 25 instructions in machine code.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

A_KEY, A_MUL = 0x9E3779B1, (0x7FEB352D, 0x846CA68B)
B_KEY, B_MUL = 0xC2B2AE3D, (0x85EBCA6B, 0xC2B2AE35)
LENGTH_MUL = 0xBF58476D1CE4E5B9
WORD_BYTES = 4
MAX_BYTES = WORD_BYTES << 32
"""Positions are 32 bits wide."""


class Rows(NamedTuple):
    """Bytes of one tensor where they lie: equal rows at a fixed distance."""

    address: int
    """Of the first byte."""
    rows: int
    row_bytes: int
    row_stride: int
    """Bytes from one row to the next; ``row_bytes`` for a single row."""

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def alignment(self) -> int:
        """Largest of 16, 4 and 1 that divides the address, the stride and, unless there is one row, the row's bytes."""
        combined = self.address | (self.row_stride | self.row_bytes if self.rows > 1 else 0)
        return 16 if combined % 16 == 0 else 4 if combined % WORD_BYTES == 0 else 1


def tensor_digest(tensor: torch.Tensor) -> int:
    """Digest of one tensor, see :func:`tensor_digests`."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """64-bit digest of each tensor's bytes in row-major order, an int in [0, 2**64), computed on the device that holds it.

    Any dtype, shape and device (CPU, CUDA); views whose bytes are equal rows at a fixed distance are read where they are,
    others (a transposed matrix) are copied first. A CUDA device costs at most five kernel launches and one wait for all its tensors.

    Raises:
        ValueError: a tensor of more than 16 GiB, or on a device that is neither CPU nor CUDA.
        UserError: CUDA tensors where Triton is not installed.
    """
    return DigestPlan(tensors).run().tolist()


class DigestPlan:
    """Digests of tensors that stay where they are: described once, on a GPU with the tables there, and run any number of times.

    It keeps the tensors alive. Those that have to be copied first are copied at every run.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Errors as of :func:`tensor_digests`."""
        members: dict[torch.device, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            members[tensor.device].append(index)
        self._count = len(tensors)
        self._parts = [(indices, _DevicePart(device, [tensors[i] for i in indices])) for device, indices in members.items()]

    def run(self) -> np.ndarray:
        """uint64 ``[tensors]``: digests of the bytes as they are now."""
        return self.start()()

    def start(self) -> Callable[[], np.ndarray]:
        """Start reading, on a GPU in the order of the current stream; the call of the result waits and gives what :meth:`run` gives.

        Start again only after that.
        """
        started = [(indices, part.start()) for indices, part in self._parts]

        def digests() -> np.ndarray:
            found = np.zeros(self._count, dtype=np.uint64)
            for indices, of_part in started:
                found[indices] = of_part()
            return found

        return digests


class RepeatedDigests:
    """Digests of one sequence of tensors, sync after sync: its plan is kept while it is the same object and no tensor has moved."""

    def __init__(self) -> None:
        self._tensors: Sequence[torch.Tensor] = ()
        self._addresses: list[int] = []
        self._plan = DigestPlan(())

    def of(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        """uint64 ``[tensors]``; errors as of :func:`tensor_digests`."""
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        if tensors is not self._tensors or addresses != self._addresses:
            self._plan, self._tensors, self._addresses = DigestPlan(tensors), tensors, addresses
        return self._plan.run()


class _DevicePart:
    """The tensors of a plan that are on one device; held, since the description has addresses alone."""

    def __init__(self, device: torch.device, tensors: list[torch.Tensor]) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"digests are computed on CPU and CUDA tensors, not on {device}")
        self._device, self._tensors = device, tensors
        rows = [_rows_in_place(tensor) for tensor in tensors]
        self._lengths = np.array([tensor.nbytes for tensor in tensors], dtype=np.uint64)
        found = [row for row in rows if row is not None]
        self._sums = self._prepared(found) if len(found) == len(rows) else None

    def _prepared(self, described: list[Rows]) -> Callable[[], Callable[[], np.ndarray]]:
        if self._device.type == "cpu":
            from e2e_fp8.numerics.digest_cpu import prepared_sums
        else:
            from e2e_fp8.numerics.digest_cuda import prepared_sums
        return prepared_sums(described, self._device)

    def start(self) -> Callable[[], np.ndarray]:
        """Start reading; the call of the result gives uint64 ``[tensors]``."""
        # The second of each pair owns the memory that the first describes, and lives as long as the result.
        described = [] if self._sums is not None else [_rows_of(tensor) for tensor in self._tensors]
        lane_sums = (self._sums or self._prepared([row for row, _ in described]))()

        def digests() -> np.ndarray:
            lanes = lane_sums()
            described.clear()
            with np.errstate(over="ignore"):
                high = lanes[:, 1].astype(np.uint64) << np.uint64(32)
                return lanes[:, 0].astype(np.uint64) + high + self._lengths * np.uint64(LENGTH_MUL)

        return digests


def _rows_in_place(tensor: torch.Tensor) -> Rows | None:
    """Where the bytes of ``tensor`` are; None when they are not equal rows at a fixed distance."""
    num_bytes = tensor.nbytes
    if num_bytes > MAX_BYTES:
        raise ValueError(f"a tensor of {num_bytes} bytes has no digest: positions are 32-bit words, at most {MAX_BYTES} bytes")
    if tensor.is_contiguous():
        return Rows(tensor.data_ptr(), 1, num_bytes, num_bytes)
    element = tensor.element_size()
    axes = _axes(tensor.shape, tensor.stride())
    if len(axes) != 2:
        return None
    (columns, _), (rows, stride) = axes
    return Rows(tensor.data_ptr(), rows, columns * element, stride * element)


def _rows_of(tensor: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """As :func:`_rows_in_place`, of a contiguous copy where there are none; and the tensor that owns the memory."""
    rows = _rows_in_place(tensor)
    if rows is None:
        tensor = tensor.detach().contiguous()
        rows = Rows(tensor.data_ptr(), 1, tensor.nbytes, tensor.nbytes)
    return rows, tensor


def _axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(size, stride) from the innermost axis outwards, the first of stride 1; axes that continue each other are one."""
    axes = [(1, 1)]
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        inner_size, inner_stride = axes[-1]
        if stride == inner_size * inner_stride:
            axes[-1] = (inner_size * size, inner_stride)
        else:
            axes.append((size, stride))
    return axes
