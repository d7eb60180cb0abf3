"""Error metrics and byte digests."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9


_WORDS_AT_ONCE = 1 << 22


def tensor_digest(tensor: torch.Tensor) -> int:
    """Order-sensitive 64-bit digest of a tensor's bytes in row-major order, the same on every device; int in [0, 2**64).

    Bytes are taken as 32-bit words, zero padded; each word is combined with its position and mixed by multiply and shift in
    wrapping 64-bit arithmetic, then summed. Dtype and shape do not enter, the number of bytes does. Guards against faults,
    not against forgery.
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """:func:`tensor_digest` of each. Tensors of one size are mixed together, so that a model of thousands of tensors costs a
    few dozen kernel launches and one wait for each device, instead of ten launches a tensor."""
    groups: dict[tuple[torch.device, int], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.device, tensor.numel() * tensor.element_size()].append(index)
    sums: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    order_of: dict[torch.device, list[int]] = defaultdict(list)
    for (device, size), members in groups.items():
        at_once = max(1, 4 * _WORDS_AT_ONCE // max(size, 1))
        for start in range(0, len(members), at_once):
            chosen = members[start : start + at_once]
            sums[device].append(_word_sums(torch.stack([_words(tensors[i]) for i in chosen])))
            order_of[device] += chosen
    digests = [0] * len(tensors)
    for device, order in order_of.items():
        for index, total in zip(order, torch.cat(sums[device]).tolist(), strict=True):
            size = tensors[index].numel() * tensors[index].element_size()
            digests[index] = (total + size * _MIX) & ((1 << 64) - 1)
    return digests


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """int32 ``[W]``: the bytes in row-major order, zero padded to whole words."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        # A new tensor starts aligned, as the view of 32-bit words needs.
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 4)])
    return raw.view(torch.int32)


def _word_sums(words_BW: torch.Tensor) -> torch.Tensor:
    """int64 ``[B]``: the wrapping sum of the mixed words of each row."""
    total = torch.zeros(words_BW.shape[0], dtype=torch.int64, device=words_BW.device)
    for start in range(0, words_BW.shape[1], _WORDS_AT_ONCE):
        chunk = words_BW[:, start : start + _WORDS_AT_ONCE]
        position = torch.arange(start + 1, start + 1 + chunk.shape[1], device=words_BW.device, dtype=torch.int64).mul_(_GOLDEN)
        mixed = (position + chunk).mul_(_MIX)
        mixed.bitwise_xor_(mixed >> 29).mul_(_GOLDEN)
        mixed.bitwise_xor_(mixed >> 32)
        total += mixed.sum(dim=1)
    return total


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
