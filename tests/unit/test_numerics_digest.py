"""Digests: equal to the slow reference for every view, different after every fault that was thought of."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.digest_reference import digest_of_bytes, digest_of_tensor

from e2e_fp8.numerics import digest
from e2e_fp8.numerics.digest import tensor_digest, tensor_digests

INTERPRETED = Path(__file__).parent / "digest_interpreted.py"


def of_bytes(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(raw=st.binary(max_size=70))
@settings(max_examples=200, deadline=None)
def test_digest_is_its_definition(raw):
    assert tensor_digest(of_bytes(raw)) == digest_of_bytes(raw)


def test_digest_of_known_bytes_never_changes():
    """Digests are compared between machines and years, so a new formula needs a new name."""
    assert tensor_digest(torch.arange(256, dtype=torch.uint8)) == digest_of_bytes(bytes(range(256))) == 0xA97F547F85598629


@given(
    data=st.data(), rows=st.integers(1, 9), columns=st.integers(1, 41), dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])
)
@settings(max_examples=200, deadline=None)
def test_every_view_has_the_digest_of_its_bytes(data, rows, columns, dtype):
    """Slices of rows and columns, steps, transposes, at bases that are not aligned to words."""
    offset = data.draw(st.integers(0, 5))
    raw = random_bytes(offset * dtype.itemsize + rows * columns * dtype.itemsize, seed=data.draw(st.integers(0, 9)))
    whole = raw.view(dtype)[offset:].view(rows, columns)
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top, rows)), data.draw(st.integers(left, columns))
    view = whole[top : bottom : data.draw(st.integers(1, 3)), left : right : data.draw(st.integers(1, 2))]
    view = view.t() if data.draw(st.booleans()) else view
    assert tensor_digest(view) == tensor_digest(view.clone()) == digest_of_tensor(view)


def test_views_are_read_in_place():
    """Expert slices, row ranges and trimmed scale columns; only what is not rows at a fixed distance is copied."""
    w13 = random_bytes(4, 64, 96)
    scales = torch.rand(4, 12, 16)
    in_place = [
        w13[2],
        w13[:, :32],
        w13[1, 16:48],
        scales[:, :, :13],
        scales[3, :, :5],
        w13.view(256, 96)[::2],
        scales[:, 3],
        scales[:1, :, 2:3],
        w13[..., ::2],
    ]
    copied = [w13.transpose(0, 1), w13[:, :20:2, :32], w13[0].t()]
    assert tensor_digests(in_place + copied) == [digest_of_tensor(t) for t in in_place + copied]
    addresses = [digest._rows_of(t)[0].address for t in in_place + copied]
    assert [a == t.data_ptr() for a, t in zip(addresses, in_place + copied, strict=True)] == [True] * len(in_place) + [False] * len(copied)


def test_dtype_and_shape_do_not_enter():
    x = torch.randn(12, 20)
    expected = tensor_digest(x)
    assert tensor_digest(x.view(torch.uint8)) == tensor_digest(x.view(240)) == tensor_digest(x.view(torch.int32)) == expected
    assert tensor_digest(x.clone().requires_grad_()) == expected
    assert tensor_digest(torch.tensor(1.5)) == tensor_digest(torch.tensor([1.5])) == digest_of_tensor(torch.tensor([1.5]))
    assert tensor_digests([torch.empty(0, 3), torch.empty(2, 0), torch.empty(0)]) == [digest_of_bytes(b"")] * 3


@given(data=st.data(), size=st.integers(1, 600))
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_changes_both_lanes(data, size):
    x = random_bytes(size, seed=data.draw(st.integers(0, 99)))
    flipped = x.clone()
    flipped[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before, after = tensor_digest(x), tensor_digest(flipped)
    assert (before ^ after) & 0xFFFFFFFF
    length = size * digest.LENGTH_MUL
    assert (before - length) >> 32 & 0xFFFFFFFF != (after - length) >> 32 & 0xFFFFFFFF


@given(data=st.data(), size=st.integers(2, 300), unit=st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=150, deadline=None)
def test_an_exchange_changes_the_digest_unless_the_two_are_equal(data, size, unit):
    x = random_bytes(size, unit, seed=data.draw(st.integers(0, 99)))
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = x.clone()
    swapped[i], swapped[j] = x[j], x[i]
    assert (tensor_digest(swapped) == tensor_digest(x)) is bool(torch.equal(x[i], x[j]))


@given(raw=st.binary(min_size=2, max_size=90), by=st.integers(1, 89))
@settings(max_examples=150, deadline=None)
def test_shifted_and_rotated_bytes_differ(raw, by):
    by %= len(raw)
    rotated = raw[by:] + raw[:by]
    assert (tensor_digest(of_bytes(rotated)) == tensor_digest(of_bytes(raw))) is (rotated == raw)
    assert tensor_digest(of_bytes(b"\0" + raw)) != tensor_digest(of_bytes(raw)) != tensor_digest(of_bytes(raw + b"\0"))


def test_every_single_bit_flip_of_a_tile_gives_its_own_digest():
    x = random_bytes(512)
    flips = x.repeat(4096, 1)
    flips[range(4096), [bit // 8 for bit in range(4096)]] ^= torch.tensor([1 << bit % 8 for bit in range(4096)], dtype=torch.uint8)
    assert len({tensor_digest(x), *tensor_digests(list(flips))}) == 4097


def test_constant_tensors_of_different_sizes_differ():
    for value in (0, 0x38, 0xFF):
        assert len(set(tensor_digests([torch.full((size,), value, dtype=torch.uint8) for size in range(300)]))) == 300


def test_negative_zero_and_nan_payloads_are_seen():
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    assert tensor_digest(bits[:1].view(torch.float32)) != tensor_digest(bits[1:].view(torch.float32))


def lane_changes(words: np.ndarray, flip: int) -> tuple[np.ndarray, np.ndarray]:
    """How a flipped bit of each word changes the two sums, int64 in [0, 2**32), in numpy and by the definition."""

    def lanes(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        i = np.arange(len(w), dtype=np.uint32)
        a, b = w ^ (i * np.uint32(digest.A_KEY)), w + i * np.uint32(digest.B_KEY)
        for x, multipliers, middle in ((a, digest.A_MUL, 15), (b, digest.B_MUL, 13)):
            x ^= x >> np.uint32(16)
            x *= np.uint32(multipliers[0])
            x ^= x >> np.uint32(middle)
            x *= np.uint32(multipliers[1])
            x ^= x >> np.uint32(16)
        return a, b

    before, after = lanes(words), lanes(words ^ np.uint32(1 << flip))
    first = torch.from_numpy(words[:1000].view(np.int32).copy())
    sums = int(before[0][:1000].sum(dtype=np.uint32)) + (int(before[1][:1000].sum(dtype=np.uint32)) << 32)
    assert (sums + 4000 * digest.LENGTH_MUL) & ((1 << 64) - 1) == tensor_digest(first)
    return tuple((y - x).astype(np.int64) for x, y in zip(before, after, strict=True))  # type: ignore[return-value]


def cancelling_pairs(change: np.ndarray) -> int:
    """Pairs of positions whose changes add up to zero."""
    values, counts = np.unique(change, return_counts=True)
    opposite = -values % (1 << 32)
    found = np.minimum(np.searchsorted(values, opposite), len(values) - 1)
    return int((counts[found] * counts)[values[found] == opposite].sum()) // 2


@pytest.mark.parametrize(("fill", "flip"), [("zeros", 31), ("random", 15), ("random", 0)])
def test_two_flips_cancel_in_a_lane_as_rarely_as_documented_and_never_in_both(fill, flip):
    """Signs of BF16 and FP32 values and lowest bits, at every pair of 2**20 positions; chance would be 128 pairs a lane."""
    size = 1 << 20
    words = np.random.default_rng(3).integers(0, 1 << 32, size, dtype=np.uint32) if fill == "random" else np.zeros(size, np.uint32)
    change_a, change_b = lane_changes(words, flip)
    chance = size * size / 2 / 2**32
    assert cancelling_pairs(change_a) < 25 * chance
    assert cancelling_pairs(change_b) < 25 * chance
    both = change_a | change_b << 32
    opposite = (-change_a % (1 << 32)) | (-change_b % (1 << 32)) << 32
    assert np.intersect1d(both, opposite).size == 0


def test_too_large_a_tensor_and_foreign_devices_are_refused():
    huge = torch.empty(1, dtype=torch.uint8).expand(digest.MAX_BYTES + 1)
    with pytest.raises(ValueError, match="17179869185 bytes"):
        tensor_digest(huge)
    with pytest.raises(ValueError, match="not on meta"):
        tensor_digest(torch.empty(3, device="meta"))


def test_gpu_kernels_agree_under_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, str(INTERPRETED)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "bytes,full,narrow,vector,words"


def test_gpu_kernel_compiles_to_vector_loads():
    """For Hopper, without one: the kernel that reads nearly all bytes must load 16 bytes at once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from e2e_fp8.numerics.digest_cuda import _WIDE, _sum_words

    constants = {"R": _WIDE[0], "C": _WIDE[1], "VECTOR": True, "MASKED": False}
    signature = {"table_ptr": "*i64", "piece_ptr": "*i64", "sums_ptr": "*i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=_sum_words, signature=signature, constexprs=constants)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "ld.global.b32" not in ptx
