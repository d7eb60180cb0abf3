"""Error metrics and byte digests."""

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


def tensor_digest(tensor: torch.Tensor) -> int:
    """Order-sensitive 64-bit digest of a tensor's bytes, the same on every device; int in [0, 2**64).

    Bytes are taken as 32-bit words (zero padded); each word is combined with its position and mixed by multiply and shift
    in wrapping 64-bit arithmetic, then summed.
    """
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    size = raw.numel()
    if size % 4 or raw.data_ptr() % 4:
        raw = torch.cat([raw, raw.new_zeros(-size % 4)])
    words = raw.view(torch.int32).to(torch.int64)
    index = torch.arange(1, words.numel() + 1, device=raw.device, dtype=torch.int64)
    mixed = (words + index * _GOLDEN) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _GOLDEN
    mixed ^= mixed >> 32
    return (int(mixed.sum()) + size * _MIX) & ((1 << 64) - 1)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepGEMM's ``1 - 2<x,y> / (<x,x> + <y,y>)`` in float64; 0 for equal tensors, also when both are zero."""
    x64, y64 = x.double(), y.double()
    denominator = float((x64 * x64 + y64 * y64).sum())
    return 0.0 if denominator == 0 else 1.0 - 2.0 * float((x64 * y64).sum()) / denominator


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise, 20 log10(|ref| / |ref - approx|), in dB; inf for equal tensors."""
    noise = torch.linalg.vector_norm(reference.double() - approximation.double())
    return float(20 * torch.log10(torch.linalg.vector_norm(reference.double()) / noise))


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Compare dtype, shape and bytes.

    Raises:
        AssertionError: names the first differing coordinate and both values.
    """
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype} against {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    size = actual.element_size()
    same = (actual.contiguous().flatten().view(torch.uint8) == expected.contiguous().flatten().view(torch.uint8)).view(-1, size).all(1)
    if bool(same.all()):
        return
    flat = int((~same).nonzero()[0])
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
    values = actual.flatten()[flat].float().item(), expected.flatten()[flat].float().item()
    raise AssertionError(
        f"{name}: {int((~same).sum())} of {same.numel()} elements differ, first at {where}: {values[0]!r} against {values[1]!r}"
    )
