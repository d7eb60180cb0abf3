"""The receipt: after a sync, every tensor that the live engine holds in checkpoint layout has the digest that the trainer's has.

A receipt is kept as a table of tab-separated lines sorted by name, ``name dtype shape bytes digest``, and as its combined digest,
which is the 128-bit BLAKE2b of that text, so that ``tail -n +2 TABLE | b2sum -l 128`` recomputes it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.numerics.digest import DigestPlan, RepeatedDigests
from e2e_fp8.types import ExportedTensor

Covered = Literal["all", "fp8", "pieces"]
"""What a receipt compares of the delivered tensors: all, FP8 codes and their scales alone, or these in the pieces in which trainer
ranks sent them (the ``ranks`` transport), whose names are no tensors' names."""

TABLE_FORMAT = 1
_SHOWN = 8


def dtype_name(dtype: torch.dtype) -> str:
    """``float8_e4m3fn`` and so on, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def is_covered(covered: Covered, name: str, dtype: str) -> bool:
    """Whether a receipt compares this tensor."""
    return covered == "all" or dtype == dtype_name(torch.float8_e4m3fn) or name.endswith("weight_scale_inv")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a receipt says of one tensor."""

    dtype: str
    """As :func:`dtype_name` says it."""
    shape: tuple[int, ...]
    num_bytes: int
    digest: int
    """64 bits, see ``numerics.digest``."""


class TensorTable:
    """Names, dtypes and shapes of one side, sorted by name: what is the same in every receipt of a run."""

    def __init__(self, described: Mapping[str, tuple[str, tuple[int, ...], int]]) -> None:
        """``described``: HF name to dtype (as :func:`dtype_name` says it), shape and number of bytes."""
        self.names = tuple(sorted(described))
        self.described = tuple(described[name] for name in self.names)
        self.num_bytes = sum(num_bytes for _, _, num_bytes in self.described)
        self.prefixes = [
            f"{name}\t{dtype}\t{'x'.join(map(str, shape))}\t{num_bytes}\t"
            for name, (dtype, shape, num_bytes) in zip(self.names, self.described, strict=True)
        ]
        self.digest = _combined("".join(self.prefixes))
        """Equal tables have equal digests."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Digest per tensor of one side."""

    table: TensorTable
    digest_array: np.ndarray
    """uint64 ``[tensors]`` in the table's order."""
    covered: Covered
    rank: int = 0
    """Of the engine process that holds the tensors."""

    @classmethod
    def of_records(cls, tensors: Mapping[str, TensorRecord], *, covered: Covered, rank: int = 0) -> Self:
        """A manifest of single records, by HF name."""
        table = TensorTable({name: (r.dtype, r.shape, r.num_bytes) for name, r in tensors.items()})
        digests = np.array([tensors[name].digest for name in table.names], dtype=np.uint64)
        return cls(table=table, digest_array=digests, covered=covered, rank=rank)

    @cached_property
    def tensors(self) -> dict[str, TensorRecord]:
        """By HF name."""
        rows = zip(self.table.names, self.table.described, self.digest_array.tolist(), strict=True)
        return {name: TensorRecord(*described, digest) for name, described, digest in rows}

    @property
    def digests(self) -> dict[str, int]:
        """HF name to 64-bit digest of the bytes."""
        return dict(zip(self.table.names, self.digest_array.tolist(), strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of the compared tensors."""
        return self.table.num_bytes

    @cached_property
    def combined(self) -> str:
        """128 bits, hexadecimal, over names, dtypes, shapes and digests."""
        return _combined(self.lines())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.same_tensors(other) and (self.covered, self.rank) == (other.covered, other.rank)

    def same_tensors(self, other: "Manifest") -> bool:
        """Whether both hold the same tensors with the same bytes."""
        return self.table.digest == other.table.digest and np.array_equal(self.digest_array, other.digest_array)

    def lines(self) -> str:
        """The table's lines, sorted by name."""
        rows = zip(self.table.prefixes, self.digest_array.tolist(), strict=True)
        return "".join(f"{prefix}{digest:016x}\n" for prefix, digest in rows)


def _combined(lines: str) -> str:
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


class ManifestSeries:
    """Manifests of one side, sync after sync: while the same tuple comes again and nothing has moved, only bytes are looked at."""

    def __init__(self) -> None:
        self._entries: tuple[ExportedTensor, ...] = ()
        self._covered: Covered = "all"
        self._table = TensorTable({})
        self._tensors: list[torch.Tensor] = []
        self._digests = RepeatedDigests()

    def of(self, tensors: Iterable[ExportedTensor], *, covered: Covered) -> Manifest:
        """As :func:`manifest_of`."""
        if not isinstance(tensors, tuple):
            # Made for this receipt alone; to remember it would keep it alive.
            return manifest_of(tensors, covered=covered)
        if tensors is not self._entries or covered != self._covered:
            self._table, self._tensors = _covered_tensors(tensors, covered)
            self._entries, self._covered = tensors, covered
        return Manifest(table=self._table, digest_array=self._digests.of(self._tensors), covered=covered)


def _covered_tensors(tensors: Iterable[ExportedTensor], covered: Covered) -> tuple[TensorTable, list[torch.Tensor]]:
    """The table of the covered ones and, in its order, the tensors."""
    chosen = {e.name: e.tensor for e in tensors if is_covered(covered, e.name, dtype_name(e.tensor.dtype))}
    table = TensorTable({name: (dtype_name(t.dtype), tuple(t.shape), t.nbytes) for name, t in chosen.items()})
    return table, [chosen[name] for name in table.names]


def manifest_of(tensors: Iterable[ExportedTensor], *, covered: Covered = "fp8") -> Manifest:
    """Digests of the covered tensors among ``tensors``; computed on the device that holds each."""
    table, chosen = _covered_tensors(tensors, covered)
    return Manifest(table=table, digest_array=DigestPlan(chosen).run(), covered=covered)


def differences(expected: Manifest, actual: Manifest) -> dict[str, str]:
    """Name to what is wrong, for tensors that one side lacks or whose dtype, shape or bytes differ."""
    found = {}
    for name in sorted(expected.tensors.keys() | actual.tensors.keys()):
        want, have = expected.tensors.get(name), actual.tensors.get(name)
        if have is None:
            found[name] = "missing"
        elif want is None:
            found[name] = "unexpected"
        elif (want.dtype, want.shape) != (have.dtype, have.shape):
            found[name] = f"is {have.dtype} {have.shape}, not {want.dtype} {want.shape}"
        elif want.digest != have.digest:
            found[name] = "bytes differ"
    return found


def check_receipt(trainer: Manifest, engine: Manifest, *, policy_version: int) -> None:
    """Compare two manifests.

    Raises:
        ByteMismatchError: names tensors that one side lacks, whose dtypes or shapes differ, or whose bytes differ.
    """
    found = {} if trainer.same_tensors(engine) else differences(trainer, engine)
    if found:
        shown = ", ".join(f"{name} ({problem})" for name, problem in list(found.items())[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ByteMismatchError(
            f"after the sync of policy version {policy_version}, {len(found)} of {len(trainer.tensors)} tensors in the rollout "
            f"engine are not the trainer's: {shown}{more}. Run `e2e-fp8 doctor` and look for switches that rewrite weights."
        )


def receipt_record(manifest: Manifest, *, policy_version: int, step: int) -> dict[str, Any]:
    """What the run's log and a table's first line say of a receipt."""
    return {
        "step": step,
        "policy_version": policy_version,
        "rank": manifest.rank,
        "covered": manifest.covered,
        "tensors": len(manifest.tensors),
        "bytes": manifest.num_bytes,
        "digest": manifest.combined,
    }


def render_table(manifest: Manifest, record: dict[str, Any]) -> str:
    """Text of a receipt table: the record as JSON behind ``#``, then the lines."""
    return f"#{json.dumps({'format': TABLE_FORMAT} | record)}\n{manifest.lines()}"


def parse_table(text: str) -> tuple[Manifest, dict[str, Any]]:
    """Inverse of :func:`render_table`.

    Raises:
        ValueError: not such a table, of another format, or its lines do not give the combined digest of its first line.
    """
    first, _, lines = text.partition("\n")
    record = json.loads(first.removeprefix("#"))
    if not isinstance(record, dict) or record.get("format") != TABLE_FORMAT:
        raise ValueError(f"not a receipt table of format {TABLE_FORMAT}")
    tensors = {}
    for line in lines.splitlines():
        name, dtype, shape, num_bytes, digest = line.split("\t")
        tensors[name] = TensorRecord(dtype, tuple(int(n) for n in shape.split("x") if n), int(num_bytes), int(digest, 16))
    if _combined(lines) != record["digest"]:
        raise ValueError("its lines do not give the digest in its first line")
    return Manifest.of_records(tensors, covered=record["covered"], rank=record["rank"]), record
