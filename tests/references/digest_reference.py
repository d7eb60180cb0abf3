"""The digest in unbounded Python integers, word after word, written from its definition alone."""

import torch

_M32 = 0xFFFFFFFF


def _mix(value: int, multipliers: tuple[int, int], middle: int) -> int:
    value = ((value ^ (value >> 16)) * multipliers[0]) & _M32
    value = ((value ^ (value >> middle)) * multipliers[1]) & _M32
    return value ^ (value >> 16)


def digest_of_bytes(raw: bytes) -> int:
    """64-bit digest of ``raw``."""
    padded = raw + bytes(-len(raw) % 4)
    lane_a = lane_b = 0
    for index in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * index : 4 * index + 4], "little")
        lane_a += _mix(word ^ (index * 0x9E3779B1 & _M32), (0x7FEB352D, 0x846CA68B), 15)
        lane_b += _mix((word + index * 0xC2B2AE3D) & _M32, (0x85EBCA6B, 0xC2B2AE35), 13)
    return ((lane_a & _M32) + ((lane_b & _M32) << 32) + len(raw) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)


def digest_of_tensor(tensor: torch.Tensor) -> int:
    """Of the tensor's bytes in row-major order."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).flatten()
    return digest_of_bytes(bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"")
