"""The receipt: after a sync, every tensor that the live engine holds in checkpoint layout has the digest that the trainer's has.

A receipt is kept as a table of tab-separated lines sorted by name, ``name dtype shape bytes digest``, and as its combined digest,
which is the 128-bit BLAKE2b of that text, so that ``tail -n +2 TABLE | b2sum -l 128`` recomputes it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from e2e_fp8.errors import ByteMismatchError
from e2e_fp8.numerics.digest import tensor_digests
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


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Digest per tensor of one side."""

    tensors: dict[str, TensorRecord]
    """By HF name."""
    covered: Covered
    rank: int = 0
    """Of the engine process that holds the tensors."""

    @property
    def digests(self) -> dict[str, int]:
        """HF name to 64-bit digest of the bytes."""
        return {name: record.digest for name, record in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the compared tensors."""
        return sum(record.num_bytes for record in self.tensors.values())

    @property
    def combined(self) -> str:
        """128 bits, hexadecimal, over names, dtypes, shapes and digests."""
        return _combined(self.lines())

    def lines(self) -> str:
        """The table's lines, sorted by name."""
        return "".join(
            f"{name}\t{r.dtype}\t{'x'.join(map(str, r.shape))}\t{r.num_bytes}\t{r.digest:016x}\n"
            for name, r in sorted(self.tensors.items())
        )


def _combined(lines: str) -> str:
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def manifest_of(tensors: Iterable[ExportedTensor], *, covered: Covered = "fp8") -> Manifest:
    """Digests of the covered tensors among ``tensors``; computed on the device that holds each."""
    entries = [entry for entry in tensors if is_covered(covered, entry.name, dtype_name(entry.tensor.dtype))]
    digests = tensor_digests([entry.tensor for entry in entries])
    records = {
        entry.name: TensorRecord(
            dtype_name(entry.tensor.dtype),
            tuple(entry.tensor.shape),
            entry.tensor.numel() * entry.tensor.element_size(),
            digest,
        )
        for entry, digest in zip(entries, digests, strict=True)
    }
    return Manifest(tensors=records, covered=covered)


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
    found = differences(trainer, engine)
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
    return Manifest(tensors=tensors, covered=record["covered"], rank=record["rank"]), record
