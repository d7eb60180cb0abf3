"""Digests on a GPU: the same integers as on the CPU and in slow Python, and the speed of reading memory."""

import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from references.digest_reference import digest_of_tensor

from e2e_fp8.numerics.arriving_digests import ArrivingDigests
from e2e_fp8.numerics.digest import tensor_digest, tensor_digests
from e2e_fp8.sync.copies import CopyPlan

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def seconds(call, rounds: int = 20) -> float:
    """Median time of ``call`` by CUDA events, queued behind one another so that the host is not in the way."""
    call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for first, last in marks:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks) / 1e3


def copy_rate(num_bytes: int) -> float:
    """Bytes read and written per second by a device copy of ``num_bytes``."""
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * num_bytes / seconds(lambda: target.copy_(source))


def test_every_length_and_base_is_the_slow_references():
    raw = random_bytes(140_000)
    lengths = [raw[:n] for n in (0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 1000, 4096, 32_767, 32_768, 32_769, 65_536, 140_000)]
    bases = [raw[start : start + n] for start in (1, 2, 3, 4, 8, 12, 16) for n in (1, 3, 4, 16, 5000, 70_000)]
    tensors = lengths + bases
    assert tensor_digests(tensors) == tensor_digests([t.cpu() for t in tensors]) == [digest_of_tensor(t) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_views_are_the_slow_references(dtype):
    def matrix(*shape: int) -> torch.Tensor:
        return random_bytes(*shape[:-1], shape[-1] * dtype.itemsize).view(dtype)

    w13, ragged, wide, scales = matrix(3, 64, 96), matrix(203, 77), matrix(3, 36_000), matrix(4, 12, 18)
    views = [w13[2], w13[:, :32], w13[1, 16:48], w13[:, ::2], w13.transpose(0, 1), w13[:, :20:2, :32]]
    views += [ragged, ragged[:, :64], ragged[:, 1:65], ragged[3:, 5:60], ragged.t(), ragged[::2], ragged[:, ::2], ragged[:1, 3:40]]
    views += [wide[:, :32_768], wide[:, :32_784], wide[:, 4:20_000], wide[:, 1:]]
    views += [scales[:, :, :16], scales[:, :6], scales[1], scales[2, :6, :16], scales[:, :, :13]]
    assert tensor_digests(views) == tensor_digests([v.clone() for v in views]) == [digest_of_tensor(v) for v in views]


def test_both_devices_agree_on_sizes_up_to_a_gibibyte_and_beyond_two():
    for size in (1, 4097, 1 << 20, (1 << 26) + 13, GIB, (5 << 29) + 7):
        x = random_bytes(size)
        assert tensor_digest(x) == tensor_digest(x.cpu()), size
        if size > 1 << 20:
            assert tensor_digest(x[3:]) == tensor_digest(x[3:].clone()), size
        before = tensor_digest(x)
        x[size // 2] ^= 64
        assert tensor_digest(x) != before
        x[size // 2] ^= 64
        assert tensor_digest(x) == before


def test_large_strided_rows_are_read_in_place():
    x = random_bytes(65_536, 16_384)
    for view in (x[:, :12_288], x[:, 16:4000], x[:, 4:16_004], x[:, 3:99], x.view(64, 1024, 16_384)[:, :512]):
        free = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        digest = tensor_digest(view)
        assert torch.cuda.max_memory_allocated() - free < view.numel() // 2 + (1 << 24)
        assert digest == tensor_digest(view.clone())


def test_repeated_digests_are_equal():
    x = random_bytes(GIB // 4)
    assert len({tensor_digest(x) for _ in range(50)}) == 1


def test_devices_can_be_mixed_in_one_call():
    x = random_bytes(10_000)
    assert len(set(tensor_digests([x, x.cpu(), x[:], x.cpu()]))) == 1


@pytest.mark.parametrize("size", [1 << 20, 1 << 24, 1 << 28, GIB, 4 * GIB])
def test_speed_of_one_tensor(size):
    from e2e_fp8.numerics import digest, digest_cuda

    x = random_bytes(size)
    rows, _ = digest._rows_of(x)
    sums = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    ((kind, pieces),) = digest_cuda._grouped([rows]).items()
    launch = digest_cuda.prepared(kind, pieces, sums)
    rate, copied = size / seconds(launch), copy_rate(size)
    print(f"\n{size} bytes: digest reads {rate / 1e9:.0f} GB/s = {rate / copied:.2f} of a copy's {copied / 1e9:.0f} GB/s (read + written)")
    if size >= 1 << 28:
        assert rate > 2.4e12, "half the memory bandwidth of an H200"


def model_like() -> list[torch.Tensor]:
    """Shapes of a 30B-A3B's experts, a tenth of its layers: codes, and scale tiles as trimmed columns of padded ones."""
    tensors = []
    for _ in range(5):
        w13, w2 = random_bytes(128, 1536, 2048), random_bytes(128, 2048, 768)
        w13_scales, w2_scales = (torch.rand(128, *shape, device="cuda") for shape in ((12, 16), (16, 8)))
        for e in range(128):
            tensors += [w13[e, :768], w13[e, 768:], w2[e], w13_scales[e, :6], w13_scales[e, 6:], w2_scales[e, :, :6]]
    return tensors


def test_speed_of_thousands_of_tensors():
    tensors = model_like()
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    tensor_digests(tensors)
    wall = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        digests = tensor_digests(tensors)
        wall.append(time.perf_counter() - started)
    assert digests == tensor_digests([t.clone() for t in tensors])
    assert digests[::97] == tensor_digests([t.cpu() for t in tensors[::97]])
    median, copied = statistics.median(wall), copy_rate(num_bytes)
    print(f"\n{len(tensors)} tensors, {num_bytes} bytes: {median * 1e3:.2f} ms, {num_bytes / median / 1e9:.0f} GB/s, host work included;")
    print(f"a flat copy moves {copied / 1e9:.0f} GB/s (read + written), {2 * num_bytes / copied * 1e3:.2f} ms")


def test_arriving_tensors_are_read_after_the_writers_stream_has_written_them():
    """Every message waits on the GPU before it is written, so that whoever reads early reads what was there before."""
    sizes = [3_000_001, 17, 1 << 22, 12_345, 1 << 20, 4096, 999_999]
    tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
    messages = [0, 0, 1, 2, 2, 3, 3]
    arriving = ArrivingDigests(tensors, messages, segment_bytes=2_000_000)
    assert len(arriving._segments) == 3
    for _ in range(3):
        sources = [torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device="cuda") for tensor in tensors]
        arriving.begin()
        for message in range(4):
            torch.cuda._sleep(30_000_000)
            for tensor, source, of in zip(tensors, sources, messages, strict=True):
                if of == message:
                    tensor.copy_(source)
            arriving.written(message)
        assert arriving.collect().tolist() == tensor_digests(sources)


def test_copies_on_two_streams_keep_the_order_of_the_current_one():
    """Sources are written late and targets are read at once."""
    sources = [torch.zeros(rows << 20, dtype=torch.uint8, device="cuda") for rows in (1, 9, 2, 30, 1, 1)]
    sources += [torch.zeros(300, 4, device="cuda")[:, :3] for _ in range(5)]
    targets = [torch.zeros_like(source) for source in sources]
    plan = CopyPlan(zip(targets, sources, strict=True))
    assert plan._beside is not None
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            fresh = [torch.randint(0, 100, source.shape, device="cuda").to(source.dtype) for source in sources]
            torch.cuda._sleep(100_000_000)
            for source, new in zip(sources, fresh, strict=True):
                source.copy_(new)
            plan.run()
            seen = [target.clone() for target in targets]
            # the next update's sources must not be written before they are read
            for source in sources:
                source.zero_()
        torch.cuda.synchronize()
        assert all(torch.equal(found, new) for found, new in zip(seen, fresh, strict=True))
