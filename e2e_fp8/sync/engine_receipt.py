"""The receipt between processes: every engine rank reports digests of the parts it holds, the trainer compares its own.

A rank names each part by its place in the Hugging Face tensor, so the trainer needs no knowledge of the engine's layout,
and parts that together do not make up the whole tensor are a mismatch too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.numerics.digest import tensor_digests
from e2e_fp8.sync.receipt import Manifest, dtype_name, is_covered, manifest_of
from e2e_fp8.types import ExportedTensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rectangle of an HF tensor that one engine rank holds."""

    name: str
    start: tuple[int, ...]
    """First index in each dimension."""
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rectangle of the whole ``tensor``, as a view."""
        return tensor[tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))]


def encode_parts(parts: Sequence[Part], digests: Sequence[int]) -> list[list[Any]]:
    """JSON values of a rank's report; 64-bit digests travel as hexadecimal."""
    return [[p.name, list(p.start), list(p.shape), f"{d:016x}"] for p, d in zip(parts, digests, strict=True)]


def decode_parts(rows: Sequence[Sequence[Any]]) -> dict[Part, int]:
    """Inverse of :func:`encode_parts`."""
    return {Part(name=n, start=tuple(a), shape=tuple(s)): int(d, 16) for n, a, s, d in rows}


def check_ranks(tensors: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[Part, int]], *, policy_version: int) -> Manifest:
    """Compare every rank's digests with the trainer's own bytes; returns the trainer's manifest.

    Raises:
        ByteMismatchError: names the tensors whose bytes differ at a rank, and those of which no rank holds some part.
    """
    manifest = manifest_of(ExportedTensor(name=name, tensor=tensor) for name, tensor in tensors.items())
    held = list(dict.fromkeys(part for rank in ranks for part in rank if part.name in tensors))
    partial = [part for part in held if part.shape != tuple(tensors[part.name].shape) or part.name not in manifest.digests]
    expected = dict(zip(partial, tensor_digests([part.of(tensors[part.name]) for part in partial]), strict=True))
    problems = [f"{part.name} (not from the trainer)" for rank in ranks for part in rank if part.name not in tensors]
    for index, rank in enumerate(ranks):
        where = f" at rank {index}" if len(ranks) > 1 else ""
        for part, digest in rank.items():
            if part.name in tensors and digest != expected.get(part, manifest.digests.get(part.name)):
                problems.append(f"{part.name} (bytes differ{where})")
    covered: dict[str, int] = {}
    for part in held:
        covered[part.name] = covered.get(part.name, 0) + torch.Size(part.shape).numel()
    problems += [
        f"{name} ({covered.get(name, 0)} of {tensor.numel()} elements are in the engine)"
        for name, tensor in tensors.items()
        if covered.get(name, 0) != tensor.numel() and (name in covered or is_covered("fp8", name, dtype_name(tensor.dtype)))
    ]
    if problems:
        shown = ", ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ByteMismatchError(
            f"after the sync of policy version {policy_version}, {len(problems)} parts of {len(manifest.digests)} FP8 tensors in the "
            f"rollout engine are not the trainer's: {shown}. Run `e2e-fp8 doctor` on both sides and look for switches that rewrite weights."
        )
    return manifest
