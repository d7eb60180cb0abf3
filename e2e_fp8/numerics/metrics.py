"""Error metrics and comparison of bytes."""

import math

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepGEMM's ``1 - 2<x,y> / (<x,x> + <y,y>)`` in float64; 0 for equal tensors, also when both are zero."""
    x64, y64 = x.detach().double(), y.detach().double()
    denominator = float((x64 * x64 + y64 * y64).sum())
    return 0.0 if denominator == 0 else 1.0 - 2.0 * float((x64 * y64).sum()) / denominator


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise, 20 log10(|ref| / |ref - approx|), in dB; inf for equal tensors, -inf for a zero reference."""
    reference, approximation = reference.detach().double(), approximation.detach().double()
    noise = float(torch.linalg.vector_norm(reference - approximation))
    signal = float(torch.linalg.vector_norm(reference))
    if noise == 0 or signal == 0:
        return math.inf if noise == 0 else -math.inf
    return 20 * math.log10(signal / noise)


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Compare dtype, shape and bytes (so NaN equals the same NaN, and 0.0 differs from -0.0).

    Raises:
        AssertionError: names the first differing coordinate, both values and both byte strings.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(f"{name}: {actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    actual_bytes, expected_bytes = (
        t.detach().cpu().contiguous().flatten().view(torch.uint8).view(-1, t.element_size()) for t in (actual, expected)
    )
    differs = (actual_bytes != expected_bytes).any(1)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape))
    shown = [
        f"{t.detach().cpu().contiguous().flatten()[first].item()!r} (0x{bytes(b[first].tolist()[::-1]).hex()})"
        for t, b in ((actual, actual_bytes), (expected, expected_bytes))
    ]
    raise AssertionError(
        f"{name}: {int(differs.sum())} of {differs.numel()} elements differ, first at {where}: {shown[0]} against {shown[1]}"
    )
