"""The receipt: after a sync, every FP8 tensor and scale in the live engine has the digest that the trainer's has."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.numerics.digest import tensor_digests
from e2e_fp8.types import ExportedTensor

_MASK64 = (1 << 64) - 1


def is_receipted(entry: ExportedTensor) -> bool:
    """Whether an exported tensor is FP8 codes or their scales, the part of the weights that the receipt covers."""
    return entry.tensor.dtype == torch.float8_e4m3fn or entry.name.endswith("weight_scale_inv")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Digest per receipted tensor, with sizes."""

    digests: dict[str, int]
    """HF name to 64-bit digest of the bytes."""
    shapes: dict[str, tuple[int, ...]]
    num_bytes: int
    """Bytes of the receipted tensors."""

    @property
    def combined(self) -> str:
        """One hexadecimal 64-bit digest over sorted names and digests."""
        value = 0xCBF29CE484222325
        for name in sorted(self.digests):
            for byte in f"{name}={self.digests[name] & _MASK64:016x};".encode():
                value = ((value ^ byte) * 0x100000001B3) & _MASK64
        return f"{value:016x}"


def manifest_of(tensors: Iterable[ExportedTensor]) -> Manifest:
    """Digests of the receipted tensors among ``tensors``; computed on the device that holds each."""
    entries = [entry for entry in tensors if is_receipted(entry)]
    digests = tensor_digests([entry.tensor for entry in entries])
    return Manifest(
        digests=dict(zip((entry.name for entry in entries), digests, strict=True)),
        shapes={entry.name: tuple(entry.tensor.shape) for entry in entries},
        num_bytes=sum(entry.tensor.numel() * entry.tensor.element_size() for entry in entries),
    )


def check_receipt(trainer: Manifest, engine: Manifest, *, policy_version: int) -> None:
    """Compare two manifests.

    Raises:
        ByteMismatchError: names tensors that one side lacks, whose shapes differ, or whose bytes differ.
    """
    problems = [f"{n} (missing in the engine)" for n in sorted(trainer.digests.keys() - engine.digests.keys())]
    problems += [f"{n} (not from the trainer)" for n in sorted(engine.digests.keys() - trainer.digests.keys())]
    for name in sorted(trainer.digests.keys() & engine.digests.keys()):
        if trainer.shapes[name] != engine.shapes[name]:
            problems.append(f"{name} (shape {trainer.shapes[name]} in the trainer, {engine.shapes[name]} in the engine)")
        elif trainer.digests[name] != engine.digests[name]:
            problems.append(f"{name} (bytes differ)")
    if problems:
        shown = ", ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ByteMismatchError(
            f"after the sync of policy version {policy_version}, {len(problems)} of {len(trainer.digests)} FP8 tensors in the rollout "
            f"engine are not the trainer's: {shown}. Run `e2e-fp8 doctor` and look for switches that rewrite weights."
        )
