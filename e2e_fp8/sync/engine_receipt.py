"""The receipt between processes: every engine rank reports digests of the parts it holds, the trainer compares its own.

A rank names each part by its place in the Hugging Face tensor, so the trainer needs no knowledge of the engine's layout,
and parts that together do not make up the whole tensor are a mismatch too.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.numerics.digest import DigestPlan, tensor_digests
from e2e_fp8.sync.receipt import Manifest, TensorTable, dtype_name, is_covered, manifest_of
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


@dataclass(frozen=True)
class PartTable:
    """The parts that one rank reports on, in the order of its digests; sent once, known by its own digest afterwards."""

    parts: tuple[Part, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """One line of JSON; equal tables have equal lines."""
        return json.dumps([[p.name, list(p.start), list(p.shape)] for p in self.parts], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "PartTable":
        """Inverse of :meth:`to_json`."""
        return cls(tuple(Part(name=n, start=tuple(a), shape=tuple(s)) for n, a, s in json.loads(text)))


def encode_digests(digests: Sequence[int]) -> str:
    """64-bit digests as base64 of little-endian words."""
    return base64.b64encode(np.array(digests, dtype="<u8").tobytes()).decode()


def decode_digests(text: str) -> np.ndarray:
    """uint64 ``[n]``; inverse of :func:`encode_digests`."""
    return np.frombuffer(base64.b64decode(text), dtype="<u8")


def seal(digests: np.ndarray) -> str:
    """128-bit BLAKE2b of 64-bit digests in their order: equal seals mean equal digests, and are all that has to travel."""
    return hashlib.blake2b(digests.astype("<u8", copy=False).tobytes(), digest_size=16).hexdigest()


class RankReceipts:
    """The trainer's comparison with every rank's digests, prepared once for a set of tensors and the ranks' tables."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], tables: Sequence[PartTable]) -> None:
        self.tables = tuple(tables)
        covered = {name: tensor for name, tensor in tensors.items() if is_covered("fp8", name, dtype_name(tensor.dtype))}
        self._table = TensorTable({name: (dtype_name(t.dtype), tuple(t.shape), t.nbytes) for name, t in covered.items()})
        shapes = [shape for _, shape, _ in self._table.described]
        index = {
            Part(name=name, start=(0,) * len(shape), shape=shape): i
            for i, (name, shape) in enumerate(zip(self._table.names, shapes, strict=True))
        }
        for part in dict.fromkeys(part for table in tables for part in table.parts):
            if part.name in tensors:
                index.setdefault(part, len(index))
        self._parts = list(index)
        unknown = [part for table in tables for part in table.parts if part not in index]
        held = {part for table in tables for part in table.parts}
        self._comparable = not unknown and not _uncovered(tensors, held)
        self._kept: Mapping[str, torch.Tensor] | None = None
        self._plan = DigestPlan(())
        self._positions = [np.array([index[p] for p in table.parts], dtype=np.int64) for table in tables] if self._comparable else []

    def expected(self, tensors: Mapping[str, torch.Tensor], *, kept: bool = False) -> np.ndarray:
        """uint64: digests of the trainer's own bytes, for :meth:`check`.

        ``kept``: the same mapping comes again in later syncs, as long as none of its tensors has moved (:class:`NamedTensors`), so that
        its parts are remembered, and with them its memory.
        """
        return self.start(tensors, kept=kept)()

    def start(self, tensors: Mapping[str, torch.Tensor], *, kept: bool = False) -> Callable[[], np.ndarray]:
        """:meth:`expected`, begun in the order of the current stream; the call of the result waits. Start again only after that."""
        if kept and tensors is self._kept:
            return self._plan.start()
        plan = DigestPlan([part.of(tensors[part.name]) for part in self._parts])
        if kept:
            self._kept, self._plan = tensors, plan
        return plan.start()

    def agreed(self, expected: np.ndarray, answers: Sequence[Mapping[str, Any]]) -> Manifest | None:
        """The trainer's manifest if every rank's answer (``table``, ``seal``) is what :meth:`expected` makes of it.

        None when some digest differs or a rank reports on other parts: its digests then have to be asked for, see :meth:`check`.
        """
        told = [(answer.get("table"), answer.get("seal")) for answer in answers]
        if not self._comparable or told != [(t.digest, seal(expected[p])) for t, p in zip(self.tables, self._positions, strict=True)]:
            return None
        return self._manifest(expected)

    def check(
        self, tensors: Mapping[str, torch.Tensor], expected: np.ndarray, ranks: Sequence[np.ndarray], *, policy_version: int
    ) -> Manifest:
        """The trainer's manifest, of ``expected`` alone where the ranks' parts make up the tensors. Raises ByteMismatchError as
        :func:`check_ranks` does."""
        if not self._comparable:
            named = [dict(zip(table.parts, map(int, digests), strict=True)) for table, digests in zip(self.tables, ranks, strict=True)]
            return check_ranks(tensors, named, policy_version=policy_version)
        problems = [
            f"{table.parts[place].name} (bytes differ{_at(rank, len(ranks))})"
            for rank, (table, where, digests) in enumerate(zip(self.tables, self._positions, ranks, strict=True))
            for place in np.flatnonzero(expected[where] != digests)
        ]
        _refuse(problems, len(self._table.names), policy_version)
        return self._manifest(expected)

    def _manifest(self, expected: np.ndarray) -> Manifest:
        return Manifest(table=self._table, digest_array=expected[: len(self._table.names)], covered="fp8")


def _uncovered(tensors: Mapping[str, torch.Tensor], held: Iterable[Part]) -> list[str]:
    """What is wrong with tensors of which no rank, or not every element, is in the engine."""
    covered: dict[str, int] = {}
    for part in held:
        covered[part.name] = covered.get(part.name, 0) + torch.Size(part.shape).numel()
    return [
        f"{name} ({covered.get(name, 0)} of {tensor.numel()} elements are in the engine)"
        for name, tensor in tensors.items()
        if covered.get(name, 0) != tensor.numel() and (name in covered or is_covered("fp8", name, dtype_name(tensor.dtype)))
    ]


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
        for part, digest in rank.items():
            if part.name in tensors and digest != expected.get(part, manifest.digests.get(part.name)):
                problems.append(f"{part.name} (bytes differ{_at(index, len(ranks))})")
    problems += _uncovered(tensors, held)
    _refuse(problems, len(manifest.digests), policy_version)
    return manifest


def _at(rank: int, ranks: int) -> str:
    return f" at rank {rank}" if ranks > 1 else ""


def _refuse(problems: Sequence[str], tensors: int, policy_version: int) -> None:
    if problems:
        shown = ", ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ByteMismatchError(
            f"after the sync of policy version {policy_version}, {len(problems)} parts of {tensors} FP8 tensors in the rollout engine are "
            f"not the trainer's: {shown}. Run `e2e-fp8 doctor` on both sides and look for switches that rewrite weights."
        )
