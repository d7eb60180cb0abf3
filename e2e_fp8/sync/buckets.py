"""Packing of named tensors into flat byte buckets, and the manifest that says what lies where.

A manifest is made once for an update and checked by the receiver before a byte of the model is written; every bucket
refers to it by digest, so a bucket of another update cannot be taken for one of this.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from e2e_fp8.errors import EngineError

ALIGNMENT = 256
"""Offsets are multiples of this many bytes: wide loads on every device."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.bfloat16, torch.float16, torch.float32)
}
"""Dtypes that can be sent, by the name that stands in a manifest."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor and its place in a bucket."""

    name: str
    """HF name."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte within the bucket."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class UpdateManifest:
    """Everything that one weight update will send."""

    policy_version: int
    buckets: tuple[tuple[TensorSpec, ...], ...]

    @property
    def capacity(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket_bytes(bucket) for bucket in self.buckets), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(spec.num_bytes for bucket in self.buckets for spec in bucket)

    def specs(self) -> Iterator[TensorSpec]:
        """All tensors in the order they are sent."""
        for bucket in self.buckets:
            yield from bucket

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's JSON form: names, dtypes, shapes, offsets and version."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest as one line of JSON; equal manifests have equal lines."""
        buckets = [[[s.name, str(s.dtype).removeprefix("torch."), list(s.shape), s.offset] for s in bucket] for bucket in self.buckets]
        return json.dumps({"policy_version": self.policy_version, "buckets": buckets}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "UpdateManifest":
        """Parse :meth:`to_json`. Raises EngineError for anything else, overlaps and unknown dtypes included."""
        try:
            data = json.loads(text)
            buckets = tuple(
                tuple(TensorSpec(name=str(n), dtype=DTYPES[d], shape=tuple(map(int, s)), offset=int(o)) for n, d, s, o in bucket)
                for bucket in data["buckets"]
            )
            manifest = cls(policy_version=int(data["policy_version"]), buckets=buckets)
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"Weight update refused, nothing was written: its manifest is malformed ({error!r}).") from error
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise EngineError when tensors overlap, are misaligned, or one name comes twice."""
        seen: set[str] = set()
        for bucket in self.buckets:
            end = 0
            for spec in bucket:
                if spec.offset < end or spec.offset % ALIGNMENT or min(spec.shape, default=1) < 0:
                    raise EngineError(f"Weight update refused, nothing was written: {spec.name} has an impossible place in its bucket.")
                if spec.name in seen:
                    raise EngineError(f"Weight update refused, nothing was written: {spec.name} came twice.")
                seen.add(spec.name)
                end = spec.offset + spec.num_bytes


def bucket_bytes(bucket: Sequence[TensorSpec]) -> int:
    """Bytes that ``bucket`` takes, alignment included."""
    return max((spec.offset + spec.num_bytes for spec in bucket), default=0)


def plan_update(tensors: Sequence[tuple[str, torch.Tensor]], *, policy_version: int, max_bytes: int) -> UpdateManifest:
    """Fill buckets of at most ``max_bytes`` with (HF name, tensor) pairs, in order; a larger tensor gets a bucket of its own.

    Raises EngineError for a dtype that cannot be sent or a name that comes twice.
    """
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        if tensor.dtype not in DTYPES.values():
            raise EngineError(f"Weight update refused, nothing was written: {name} is {tensor.dtype}, which is not a dtype of weights.")
        size = tensor.numel() * tensor.element_size()
        if current and offset + size > max_bytes:
            buckets.append(tuple(current))
            current, offset = [], 0
        current.append(TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    if current:
        buckets.append(tuple(current))
    manifest = UpdateManifest(policy_version=policy_version, buckets=tuple(buckets))
    manifest.check()
    return manifest


def views(bucket: Sequence[TensorSpec], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of ``bucket`` as views of ``buffer`` (uint8 ``[capacity]``)."""
    return [buffer[s.offset : s.offset + s.num_bytes].view(s.dtype).view(s.shape) for s in bucket]


def pack(bucket: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the bytes of each tensor to its place in ``buffer`` (uint8 ``[capacity]``, any device)."""
    targets = [buffer[s.offset : s.offset + s.num_bytes] for s in bucket]
    sources = [tensors[s.name].detach().contiguous().view(-1).view(torch.uint8) for s in bucket]
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
