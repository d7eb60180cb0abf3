"""The CUDA digest kernels on CPU memory under Triton's interpreter, against the slow reference. Prints the kinds of pieces seen.

Run with ``TRITON_INTERPRET=1``, which Triton reads when it is imported.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from triton.runtime.interpreter import ReduceOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.digest_reference import digest_of_tensor

from e2e_fp8.numerics import digest, digest_cuda


def wrapping_sum(self, x):
    """The interpreter adds 32-bit integers in 64 bits and fails on the result, where hardware wraps."""
    total = np.sum(x.handle.data, axis=self.axis, keepdims=self.keep_dims, dtype=x.handle.data.dtype)
    return self.to_tensor(total, x.dtype)


def cases() -> list[torch.Tensor]:
    raw = torch.randint(0, 256, (33_000,), dtype=torch.uint8)
    lengths = [raw[:n] for n in (0, 1, 2, 3, 4, 5, 15, 16, 17, 33, 1000, 4096, 32_768, 32_769, 33_000)]
    bases = [raw[start : start + n] for start in (1, 2, 3, 4, 8) for n in (1, 3, 4, 16, 500)]
    ragged = torch.randint(0, 256, (203, 77), dtype=torch.uint8)
    matrix = torch.randint(0, 256, (150, 1024), dtype=torch.uint8)
    wide = torch.randint(0, 256, (3, 36_000), dtype=torch.uint8)
    scales = torch.rand(4, 12, 18)
    views = [ragged, ragged[:, :64], ragged[:, 1:65], ragged[3:, 5:60], ragged.t(), ragged[::2], ragged[:, ::2], ragged[:1, 3:40]]
    views += [matrix[:, :512], matrix[:, :24], matrix[:, 4:1000], matrix[::3], matrix[:, :3]]
    views += [wide[:, :32_768], wide[:, :32_784], wide[:, 4:20_000], scales[:, :, :16], scales[:, :6], scales[1], scales[2, :6, :16]]
    return lengths + bases + views


def main() -> None:
    ReduceOps.sum = wrapping_sum
    tensors = cases()
    described = [digest._rows_of(t) for t in tensors]
    start = digest_cuda.prepared_sums([rows for rows, _ in described], torch.device("cpu"))
    sums = start()().copy()
    assert (start()() == sums).all(), "a second run does not start from zero"
    for tensor, (a, b) in zip(tensors, sums.tolist(), strict=True):
        length = tensor.numel() * tensor.element_size() * digest.LENGTH_MUL
        assert (a + (b << 32) + length) & ((1 << 64) - 1) == digest_of_tensor(tensor), (tuple(tensor.shape), tensor.stride())
    print(",".join(sorted(digest_cuda._grouped([rows for rows, _ in described]))))


if __name__ == "__main__":
    main()
