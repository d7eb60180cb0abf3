"""Packing of named tensors into flat byte buckets, and the manifest that says what lies where.

A manifest is made once for an update and checked by the receiver before a byte of the model is written; every bucket
refers to it by digest, so a bucket of another update cannot be taken for one of this.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.sync.copies import CopyPlan

ALIGNMENT = 16
"""Offsets are multiples of this many bytes: wide loads on every device. More would leave gaps between the scales of experts, each of a few
hundred bytes, and with them thousands of copies in place of one for a layer."""
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

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(spec.num_bytes for bucket in self.buckets for spec in bucket)

    def specs(self) -> Iterator[TensorSpec]:
        """All tensors in the order they are sent."""
        for bucket in self.buckets:
            yield from bucket

    def at_version(self, policy_version: int) -> "UpdateManifest":
        """The same tensors at the same places, as another update; what is known of the layout is not computed again."""
        other = UpdateManifest(policy_version=policy_version, buckets=self.buckets)
        other.__dict__.update(layout_digest=self.layout_digest, num_bytes=self.num_bytes)
        return other

    @cached_property
    def layout_digest(self) -> str:
        """SHA-256 of the JSON form of the buckets: names, dtypes, shapes and offsets."""
        return hashlib.sha256(_json(self._plain_buckets())).hexdigest()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of version and :attr:`layout_digest`."""
        return _update_digest(self.policy_version, self.layout_digest)

    def _plain_buckets(self) -> list:
        return [[[s.name, str(s.dtype).removeprefix("torch."), list(s.shape), s.offset] for s in bucket] for bucket in self.buckets]

    def to_json(self) -> str:
        """The manifest as one line of JSON; equal manifests have equal lines."""
        return _json({"policy_version": self.policy_version, "buckets": self._plain_buckets()}).decode()

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


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """One call of an update: any of beginning it, taking what ``update`` announces, and finishing it."""

    layout: str
    """``layout_digest`` of a prepared manifest."""
    policy_version: int
    channel: str
    """Id of the channel that the trainer opened."""
    begin: bool
    update: dict[str, Any]
    finish: bool
    receipt: bool = False
    """Whether the engine's memory is digested in the same call, each part after the last message that writes it."""
    compare: bool = False
    """Whether the trainer is going to compare bytes: generation resumes only once it says that it has."""
    flags: str = ""
    """Id of the ``TrainerFlags`` by which the trainer says when to begin; empty to begin at once."""
    turn: int = 0
    """Their turn."""
    patience_s: float = 0.0
    """How long to wait for the trainer's word, and with ``compare`` and ``resume`` for its comparison."""
    resume: bool = False
    """Whether generation goes on in the same call; with ``compare`` no answer leaves before the trainer says that it has compared. The
    receipt's digests are begun then, and asked for later."""

    @property
    def update_digest(self) -> str:
        """``digest`` of the update's manifest."""
        return _update_digest(self.policy_version, self.layout)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> "UpdateStep":
        """A step from the JSON of :meth:`to_dict`. Raises EngineError for anything else."""
        try:
            step = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise EngineError(f"Malformed step of a weight update ({error!r}); refused.") from error
        kinds = (str, int, str, bool, dict, bool, bool, bool, str, int, int | float, bool)
        if not all(isinstance(value, kind) for value, kind in zip(vars(step).values(), kinds, strict=True)):
            raise EngineError("Malformed step of a weight update; refused.")
        if not 0 <= step.patience_s < math.inf:
            raise EngineError(f"A step of a weight update would wait {step.patience_s} s; refused.")
        if step.flags and not (step.begin and step.finish):
            raise EngineError("An announced update is one step, and this one does not begin and finish it; refused.")
        if step.resume and not step.finish:
            raise EngineError("Generation cannot go on in a step that does not finish its update; refused.")
        return step


def _update_digest(policy_version: int, layout: str) -> str:
    return hashlib.sha256(f"{policy_version} {layout}".encode()).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def bucket_bytes(bucket: Sequence[TensorSpec]) -> int:
    """Bytes that ``bucket`` takes, alignment included; its tensors are in the order of their offsets (:meth:`UpdateManifest.check`)."""
    return bucket[-1].offset + bucket[-1].num_bytes if bucket else 0


def plan_update(
    tensors: Sequence[tuple[str, torch.Tensor]], *, policy_version: int, max_bytes: int, alone_bytes: int | None = None
) -> UpdateManifest:
    """Fill buckets of at most ``max_bytes`` with (HF name, tensor) pairs, in order; a larger tensor gets a bucket of its own.

    With ``alone_bytes`` a tensor of at least so many bytes has a bucket of its own, and so have those together that an engine keeps in one
    parameter (a layer's experts, gate and up, query, key and value) where they follow each other in memory: such a bucket lies there as
    it is packed, see :func:`lying`. The others are packed in the order of memory, neighbours side by side; their buckets are in the
    middle, where those before keep the wire busy while they are packed.

    Raises EngineError for a dtype that cannot be sent or a name that comes twice.
    """
    for name, tensor in tensors:
        if tensor.dtype not in DTYPES.values():
            raise EngineError(f"Weight update refused, nothing was written: {name} is {tensor.dtype}, which is not a dtype of weights.")
    runs = [] if alone_bytes is None else _runs(tensors)
    alone = [run for run in runs if sum(t.nbytes for _, t in run) >= (alone_bytes or 0)]
    in_runs = {id(entry[1]) for run in runs for entry in run}
    whole = [bucket for run in alone for bucket in _filled(run, max_bytes)]
    joined = [entry for run in runs if not any(run is other for other in alone) for entry in run]
    packed = _filled([*joined, *(entry for entry in tensors if id(entry[1]) not in in_runs)], max_bytes)
    half = len(whole) // 2
    manifest = UpdateManifest(policy_version=policy_version, buckets=(*whole[:half], *packed, *whole[half:]))
    manifest.check()
    return manifest


def _filled(tensors: Sequence[tuple[str, torch.Tensor]], max_bytes: int) -> list[tuple[TensorSpec, ...]]:
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        if current and offset + tensor.nbytes > max_bytes:
            buckets.append(tuple(current))
            current, offset = [], 0
        current.append(TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset))
        offset += _aligned(tensor.nbytes)
    return [*buckets, tuple(current)] if current else buckets


_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.(.*)")
_FUSED = re.compile(r"(.*)\.(?:(?:q|k|v)_proj|(gate|up)_proj)\.(.*)")


def _parameter_group(name: str) -> tuple[str, ...] | None:
    """Equal for tensors that are one parameter in an engine; None for those that are one alone."""
    if found := _EXPERT.fullmatch(name):
        return found[1], "down" if found[2] == "down" else "gate_up", found[3]
    found = _FUSED.fullmatch(name)
    return found and (found[1], "gate_up" if found[2] else "qkv", found[3])


def _runs(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Contiguous tensors, those of one parameter together where they follow each other in one storage as a bucket packs them."""
    runs: list[list[tuple[str, torch.Tensor]]] = []
    end: tuple = ()
    for entry in sorted((e for e in tensors if e[1].is_contiguous() and e[1].numel()), key=lambda e: e[1].data_ptr()):
        name, tensor = entry
        group, storage = _parameter_group(name), tensor.untyped_storage().data_ptr()
        if group and (group, storage, tensor.data_ptr()) == end:
            runs[-1].append(entry)
        else:
            runs.append([entry])
        # A bucket has a gap behind a size that is no multiple.
        end = (group, storage, tensor.data_ptr() + tensor.nbytes) if tensor.nbytes % ALIGNMENT == 0 else ()
    return runs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lying(bucket: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The bytes of ``bucket`` in the memory of its ``tensors``, if they lie there as they are packed; uint8 ``[bucket_bytes]``."""
    first = tensors[0]
    if first is None:
        return None
    base, storage, end = first.data_ptr(), first.untyped_storage(), 0
    for spec, tensor in zip(bucket, tensors, strict=True):
        # a gap of the bucket may hold something else in the memory
        if tensor is None or not tensor.is_contiguous() or spec.offset != end or tensor.data_ptr() != base + end:
            return None
        end += spec.num_bytes
        if tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return None
    start = base - storage.data_ptr()
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, start, (bucket_bytes(bucket),), (1,))  # pyright: ignore[reportArgumentType]


def views(bucket: Sequence[TensorSpec], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of ``bucket`` as views of ``buffer`` (uint8 ``[capacity]``)."""
    return [buffer[s.offset : s.offset + s.num_bytes].view(s.dtype).view(s.shape) for s in bucket]


def packing(bucket: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> CopyPlan:
    """Copies of the bytes of each tensor to its place in ``buffer`` (uint8 ``[capacity]``, any device)."""
    return CopyPlan(zip(views(bucket, buffer), (tensors[s.name] for s in bucket), strict=True))


def pack(bucket: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Run :func:`packing` once."""
    packing(bucket, tensors, buffer).run()
